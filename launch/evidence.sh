#!/bin/sh
# The tables and figures of docs/evidence.md from shorter runs: 300 local steps, one seed. Two cores, 25 minutes.
#   usage: launch/evidence.sh        (or: make evidence)
# Finished runs are kept in runs/evidence; what was interrupted goes on there.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
short='--seeds 1 --set training.train_iters=300 --set scheduler.params.warmup_num_steps=30 --jobs 2'
for study in recipe exchange; do
    mkdir -p "runs/evidence/$study"
    echo "$study: runs/evidence/$study/table.md, benefit.png; what it does: log.txt"
    # shellcheck disable=SC2086  # several options
    "$python" -m tools.study "tools/studies/$study.json" --output "runs/evidence/$study" $short 2>>"runs/evidence/$study/log.txt"
done
echo 'latency: runs/evidence/latency.json'
"$python" -m tools.simulate_latency >runs/evidence/latency.json
