#!/usr/bin/env bash
# The main job, end to end, on this machine: sets up, builds, makes a dataset of real text, records a
# small run whose loss spikes, proves the recording by replaying it, replays it with one thing changed,
# and shows where the two part. A few minutes on two cores after the installation.
#
#   scripts/demo.sh [DIRECTORY]      everything goes to DIRECTORY (default: demo/)
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh
work=${1:-demo}
retrace=$PWD/build/retrace
recipe=$PWD/examples/demo.toml
mkdir -p "$work"
cd "$work"

show() { echo; echo "\$ retrace $*"; "$retrace" "$@"; }

echo
echo "demo [1/5] a dataset from the text of a dictionary (Debian's dict-gcide)"
show data build /usr/share/dictd/gcide.dict.dz -o data/gcide --vocab-size 4096 --max-text 12MB

echo
echo "demo [2/5] record a run on 2 tensor-parallel ranks, every state of updates 0..24 kept"
if [ -e runs/demo/ledger.jsonl ]; then
  show train --resume runs/demo --tp 2
else
  show train "$recipe" -o runs/demo --tp 2
fi

echo
echo "demo [3/5] prove it: live updates 1..24 again"
show replay runs/demo --steps 1..24

echo
echo "demo [4/5] the same updates with one thing changed: no gradient clipping from update 4 on"
rm -rf runs/demo-clip
show replay runs/demo --steps 4..24 --do clip:none --tp 2

echo
echo "demo [5/5] where the two part"
show diff runs/demo runs/demo-clip || [ $? = 1 ]
show log runs/demo runs/demo-clip --plot --steps 1..24
echo
echo "Everything is in $work. Next: retrace show runs/demo; retrace interventions; README.md"
