#!/bin/sh
# The tables and figures of docs/evidence.md from shorter runs: 300 local steps, one seed. Two cores, 25 minutes.
#   usage: launch/evidence.sh        (or: make evidence)
# Finished runs are kept in runs/evidence; what was interrupted goes on there.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
short='--seeds 1 --set training.train_iters=300 --set scheduler.params.warmup_num_steps=30 --jobs 2'
for study in recipe exchange; do
    echo "$study: runs/evidence/$study/table.md, benefit.png"
    # shellcheck disable=SC2086  # several options
    "$python" -m tools.study "tools/studies/$study.json" --output "runs/evidence/$study" $short 2>/dev/null
done
echo 'latency: runs/evidence/latency.json'
"$python" -m tools.simulate_latency >runs/evidence/latency.json
