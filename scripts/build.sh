#!/usr/bin/env bash
# Sets up (scripts/setup.sh, whose options it takes), configures and builds into build/: the program,
# and with --for-tests the tests too.
#
#   scripts/build.sh [--for-tests] [--without-torch] [--without-cuda]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh "$@"

# A compiler takes up to 1.5 GB for some files: no more of them than memory holds.
cores=$(nproc)
memory=$(awk '/MemAvailable/ { print int($2 / 1500000) }' /proc/meminfo)
jobs=$((memory < cores ? memory : cores))
[ "$jobs" -ge 1 ] || jobs=1

echo "build: configuring"
mkdir -p build
without_cuda=OFF
case " $* ${RETRACE_WITHOUT_CUDA:+--without-cuda} " in *" --without-cuda "*) without_cuda=ON ;; esac
if ! cmake -G Ninja -S . -B build -DRETRACE_WITHOUT_CUDA=$without_cuda >build/configure.log 2>&1; then
  cat build/configure.log >&2
  exit 5
fi
grep -E '^-- retrace: ' build/configure.log || true
echo "build: compiling with $jobs jobs"
target=program
case " $* " in *" --for-tests "*) target=all ;; esac
NINJA_STATUS='build [%f/%t, %es] ' ninja -C build -j "$jobs" "$target"
