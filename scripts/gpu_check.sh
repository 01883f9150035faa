#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: builds what the GPU tests need, runs them, times a training step on
# the GPU and on the processor, and prints one summary. Meant to take less than 8 minutes.
#
#   scripts/gpu_check.sh [BUILD_FOLDER]      (build-gpu)
#
# Needs what scripts/setup.sh brings, and a driver. Exit code 4 without a GPU, 1 where a test fails.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build-gpu}
started=$SECONDS

command -v nvidia-smi >/dev/null || { echo "gpu_check: no nvidia-smi: no driver here" >&2; exit 4; }
gpu=$(nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader | head -n 1)
# Machine code for this GPU alone: a third of the time.
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
case $capability in
  8?) architecture=80 ;;
  9?) architecture=90 ;;
  1??) architecture=100 ;;
  *) echo "gpu_check: compute capability $capability: the kernels need 8.0" >&2; exit 4 ;;
esac

echo "gpu_check: $gpu"
cmake -G Ninja -S . -B "$build" -DRETRACE_CUDA_ARCHITECTURES=$architecture >"$build.log" 2>&1 ||
  { cat "$build.log" >&2; exit 5; }
ninja -C "$build" gpu_update_test retrace >>"$build.log" 2>&1 || { tail -n 30 "$build.log" >&2; exit 5; }
built=$((SECONDS - started))

failed=0
tests=$(timeout 240 "$build/gpu_update_test" 2>&1) || failed=1
[ $failed = 0 ] || echo "$tests" | grep -E 'Failure|expected|FAILED|kFailed' | head -n 20

step() {
  timeout 60 "$build/retrace" bench step examples/bench_100m.toml --updates 3 --random-tokens --device "$1" 2>&1 | tail -n 4 |
    sed "s/^/  $1: /" || echo "  $1: no result within 60 s"
}

echo "gpu_check: summary of $(date -u +%F)"
echo "  GPU: $gpu"
echo "  built in $built s for sm_$architecture"
echo "  tests: $(echo "$tests" | grep -cE '^\[       OK' || true) passed," \
  "$(echo "$tests" | grep -cE '^\[  FAILED.*ms\)' || true) failed," \
  "$(echo "$tests" | grep -cE '^\[  SKIPPED.*ms\)' || true) skipped"
step cuda
step cpu
echo "  took $((SECONDS - started)) s"
exit $failed
