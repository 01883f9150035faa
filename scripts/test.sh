#!/usr/bin/env bash
# Sets up, builds and runs every test. Arguments go to ctest (for example: -R Comm, -LE slow).
#
#   scripts/test.sh [CTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh --for-tests
echo "test: running with $(nproc) jobs"
progress=()
[ ! -t 1 ] || progress=(--progress)
ctest --test-dir build --no-tests=error --output-on-failure --timeout 600 -j "$(nproc)" \
  ${progress[@]+"${progress[@]}"} "$@"
