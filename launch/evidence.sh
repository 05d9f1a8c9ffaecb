#!/bin/sh
# The tables and figures of docs/evidence.md from shorter runs, 100 or 300 local steps, one seed. Two cores, half an hour at most.
#   usage: launch/evidence.sh        (or: make evidence)
# Finished trainings are kept in runs/evidence; what was interrupted goes on there.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=runs/evidence
mkdir -p "$out"

# tell NAME FILES: what comes now
tell() {
    mkdir -p "$out/$1"
    echo "$1: $out/$1/$2; what it does: log.txt"
}

# study NAME STEPS ...
study() {
    name=$1 steps=$2
    tell "$name" 'table.md'
    shift 2
    "$python" -m tools.study "tools/studies/$name.json" --output "$out/$name" --seeds 1 "$@" \
        --set training.train_iters="$steps" --set scheduler.params.warmup_num_steps=$((steps / 10)) 2>>"$out/$name/log.txt"
}

# measure NAME FILES MODULE ...
measure() {
    name=$1
    tell "$name" "$2"
    shift 2
    "$python" -m "$@" >"$out/$name/found.json" 2>>"$out/$name/log.txt"
}

study recipe 300 --jobs 2
study rounds 300 --jobs 2
study batch 100 --jobs 2
study exchange 300 --jobs 2
study routing 20 --trainer
measure uneven found.json tools.faults uneven --output "$out/uneven/runs" --replicas 4 --steps 20 --step-seconds 0.5
tell time 'loss.png, found.json'
code=0 # 2: network namespaces are not permitted here
"$python" -m tools.time_to_loss tools/studies/time_to_loss.json --rate 100Mbit --delay 5ms --output "$out/time" \
    --set training.train_iters=60 --set evaluation.interval=10 >/dev/null 2>>"$out/time/log.txt" || code=$?
case $code in
0) ;;
2) echo "time: left out: $(tail -n 1 "$out/time/log.txt")" ;;
*) exit "$code" ;;
esac
