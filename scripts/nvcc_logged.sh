#!/bin/sh
# nvcc_logged.sh LOG COMMAND...: runs a compiler whose messages (registers and spills of each kernel,
# by ptxas) are kept in LOG, and shown where it fails. Used by CMakeLists.txt.
log=$1
shift
"$@" >"$log" 2>&1 || { status=$?; cat "$log" >&2; exit $status; }
grep -i 'warning' "$log" >&2 || true
