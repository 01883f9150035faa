#!/usr/bin/env bash
# Brings everything that the build needs, on Debian 12 or newer. Safe to run again: what is there
# stays, what was interrupted is taken up.
#
#   scripts/setup.sh [--for-tests] [--for-peers] [--without-torch] [--without-cuda]
#
#   --for-tests      also what only the tests need (Chromium, a Python environment with h5py)
#   --for-peers      also what the benchmarks compare with (a Python environment with PyTorch; 5 GB)
#   --without-torch  leave LibTorch out: everything works but jobs over several hosts
#   --without-cuda   leave the CUDA compiler out: everything works but --device cuda
#
# Debian packages need root; without it the command to run is printed. Everything else goes to
# ${XDG_CACHE_HOME:-~/.cache}/retrace and outlives the build folder.
set -euo pipefail
cd "$(dirname "$0")/.."

for_tests=0
for_peers=0
with_torch=1
with_cuda=1
[ -z "${RETRACE_WITHOUT_TORCH:-}" ] || with_torch=0
[ -z "${RETRACE_WITHOUT_CUDA:-}" ] || with_cuda=0
for argument in "$@"; do
  case $argument in
    --for-tests) for_tests=1 ;;
    --for-peers) for_peers=1 ;;
    --without-torch) with_torch=0 ;;
    --without-cuda) with_cuda=0 ;;
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "setup: unknown option $argument; see scripts/setup.sh --help" >&2; exit 2 ;;
  esac
done

cache=${XDG_CACHE_HOME:-$HOME/.cache}/retrace
steps=$((1 + with_torch + with_cuda + (with_cuda && for_tests) + for_tests + for_peers))
step=0
say() { step=$((step + 1)); echo "setup [$step/$steps] $*"; }
fail() { echo "setup: $*" >&2; exit 5; }

build_packages=(
  g++ cmake ninja-build pkg-config ccache
  nlohmann-json3-dev libfmt-dev libtomlplusplus-dev libcli11-dev libgtest-dev
  libhdf5-dev libzstd-dev zlib1g-dev libxxhash-dev libsentencepiece-dev
  dict-gcide node-d3
)
wheel_packages=(python3-pip unzip ca-certificates)
torch_packages=(libgloo-dev "${wheel_packages[@]}")
python_packages=(python3-venv ca-certificates)
test_packages=(chromium)

debian_packages() {
  local wanted=("${build_packages[@]}") missing=() package
  [ $with_torch = 0 ] || wanted+=("${torch_packages[@]}")
  [ $with_cuda = 0 ] || wanted+=("${wheel_packages[@]}")
  [ $for_tests = 0 ] || wanted+=("${test_packages[@]}")
  [ $for_tests = 0 ] && [ $for_peers = 0 ] || wanted+=("${python_packages[@]}")
  command -v dpkg-query >/dev/null ||
    fail "no dpkg here: this script is for Debian. Elsewhere install what these packages hold: ${wanted[*]}"
  for package in "${wanted[@]}"; do
    dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed ||
      missing+=("$package")
  done
  if [ ${#missing[@]} = 0 ]; then
    say "Debian packages: all ${#wanted[@]} are installed"
    return
  fi
  say "Debian packages: installing ${#missing[@]} of ${#wanted[@]}: ${missing[*]}"
  local install=(apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "${missing[@]}")
  if [ "$(id -u)" != 0 ]; then
    echo "setup: not root, so please run this and start again:" >&2
    echo "  sudo apt-get update && sudo ${install[*]}" >&2
    exit 4
  fi
  export DEBIAN_FRONTEND=noninteractive
  mkdir -p "$cache"
  local log=$cache/apt.log
  : >"$log"
  apt-get update -q >>"$log" 2>&1 ||
    { tail -n 15 "$log" >&2; fail "apt-get update failed; all of its output is in $log"; }
  # Every tenth package, so that the wait can be seen to end.
  "${install[@]}" 2>&1 | tee -a "$log" | awk '
    /newly installed/ { total = $1 + $3; print "  " $0; fflush() }
    /^Unpacking / && ++unpacked % 10 == 0 { printf "  unpacked %d of %d\n", unpacked, total; fflush() }
    /^Setting up / && ++done % 10 == 0 { printf "  set up %d of %d\n", done, total; fflush() }' ||
    { tail -n 15 "$log" >&2; fail "apt-get install failed; all of its output is in $log"; }
}

# fetch_wheels REQUIREMENTS FOLDER. What already lies there with the right digest is not fetched
# again.
fetch_wheels() {
  python3 -m pip download --no-deps --only-binary=:all: --require-hashes --no-cache-dir \
    --disable-pip-version-check --retries 5 --timeout 60 --implementation cp \
    --python-version 3.11 --abi cp311 --abi none --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_25_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 \
    --platform manylinux_2_12_x86_64 -r "$1" -d "$2"
}

# The wheels are fetched by pip (its own configuration names the index) and checked against the
# digests in torch_wheels.txt; only libraries and headers are unpacked, into a folder that gets its
# name last.
torch_libraries() {
  local version target
  version=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' scripts/torch_wheels.txt)
  target=$cache/torch-$version-cpu
  if [ -e "$target/torch/lib/libtorch_cpu.so" ]; then
    say "LibTorch $version: is in $target"
    return
  fi
  [ "$(uname -m)" = x86_64 ] ||
    fail "no LibTorch wheel is pinned for $(uname -m); go on with scripts/setup.sh --without-torch"
  say "LibTorch $version: fetching 540 MB, keeping 500 MB in $target"
  mkdir -p "$cache"
  local free_mb
  free_mb=$(df -Pm "$cache" | awk 'NR == 2 { print $4 }')
  [ "$free_mb" -ge 1200 ] ||
    fail "$cache has $free_mb MB free, LibTorch needs 1200 while unpacking (XDG_CACHE_HOME moves it)"
  local wheels=$cache/wheels part=$target.part
  rm -rf "$part"
  mkdir -p "$wheels" "$part"
  fetch_wheels scripts/torch_wheels.txt "$wheels" ||
    fail "LibTorch could not be fetched. Try again, or go on with --without-torch"
  echo "  unpacking libraries and headers"
  unzip -qo "$wheels"/torch-*.whl torch/lib/libc10.so torch/lib/libtorch_cpu.so \
    torch/lib/libgomp.so.1 'torch/include/*' -d "$part"
  unzip -qo "$wheels"/nvidia_cuda_runtime-*.whl 'nvidia/cu13/lib/libcudart.so.*' -d "$part"
  unzip -qo "$wheels"/nvidia_cuda_cupti-*.whl 'nvidia/cu13/lib/libcupti.so.*' -d "$part"
  rm -rf "$target"
  mv "$part" "$target"
  rm -rf "$wheels"
}

# cuda_wheels REQUIREMENTS NAME MB WHAT: unpacks wheels of NVIDIA's into $cache/NAME.
cuda_wheels() {
  local target=$cache/$2
  if [ -e "$target/bin" ]; then
    say "$4: is in $target"
    return
  fi
  [ "$(uname -m)" = x86_64 ] ||
    fail "no CUDA wheels are pinned for $(uname -m); go on with scripts/setup.sh --without-cuda"
  say "$4: fetching, $3 MB in $target"
  mkdir -p "$cache"
  local free_mb wheel
  free_mb=$(df -Pm "$cache" | awk 'NR == 2 { print $4 }')
  [ "$free_mb" -ge $((2 * $3)) ] ||
    fail "$cache has $free_mb MB free, this needs $((2 * $3)) while unpacking (XDG_CACHE_HOME moves it)"
  local wheels=$cache/$2.wheels part=$target.part
  rm -rf "$part"
  mkdir -p "$wheels" "$part"
  fetch_wheels "$1" "$wheels" ||
    fail "$4: could not be fetched. Try again, or go on with --without-cuda"
  for wheel in "$wheels"/*.whl; do unzip -qo "$wheel" 'nvidia/cu13/*' -d "$part"; done
  chmod -R u+x "$part/nvidia/cu13/bin"
  [ ! -e "$part/nvidia/cu13/nvvm/bin" ] || chmod -R u+x "$part/nvidia/cu13/nvvm/bin"
  rm -rf "$target"
  mv "$part/nvidia/cu13" "$target"
  rm -rf "$wheels" "$part"
}

cuda_compiler() {
  local nvcc
  for nvcc in "${CUDA_HOME:-/nonexistent}/bin/nvcc" /usr/local/cuda/bin/nvcc "$(command -v nvcc || true)"; do
    [ -x "$nvcc" ] || continue
    "$nvcc" --version | grep -qE 'release (12\.[89]|1[3-9]\.|[2-9][0-9]\.)' || continue  # knows sm_100
    say "CUDA compiler: is $nvcc"
    return
  done
  cuda_wheels scripts/cuda_wheels.txt "cuda-$(wheel_version nvcc scripts/cuda_wheels.txt)" 260 "CUDA compiler"
}

# wheel_version PACKAGE REQUIREMENTS: that of nvidia-cuda-PACKAGE.
wheel_version() { sed -n "s/^nvidia-cuda-$1==\([^ ]*\).*/\1/p" "$2"; }

cuda_tools() {
  cuda_wheels scripts/cuda_tools_wheels.txt \
    "cuda-tools-$(wheel_version cuobjdump scripts/cuda_tools_wheels.txt)" 10 "CUDA disassembler"
}

# python_environment NAME: scripts/NAME_requirements.txt in $cache/NAME-python.
python_environment() {
  local requirements=scripts/$1_requirements.txt target=$cache/$1-python
  if cmp -s "$requirements" "$target/requirements.txt"; then
    say "Python packages ($1): are in $target"
    return
  fi
  local packages
  packages=$(grep -v '^#' "$requirements" | tr '\n' ' ')
  say "Python packages ($1): $packages in $target"
  rm -rf "$target"
  python3 -m venv "$target"
  "$target/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
    --only-binary=:all: --retries 5 --timeout 60 -r "$requirements" ||
    fail "not all of these could be installed: $packages; try again"
  cp "$requirements" "$target/requirements.txt"
}

debian_packages
[ $with_torch = 0 ] || torch_libraries
[ $with_cuda = 0 ] || cuda_compiler
[ $with_cuda = 0 ] || [ $for_tests = 0 ] || cuda_tools
[ $for_tests = 0 ] || python_environment test
[ $for_peers = 0 ] || python_environment peer
