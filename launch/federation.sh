#!/bin/sh
# Three replicas as separate jobs on this machine, of one and of two ranks: one is killed, and comes back with another
# number of ranks. At the end all are one model.
#   usage: launch/federation.sh      (or: make federation)
# They find each other in runs/federation/rendezvous, and send over the loopback interface.
set -eu
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"
cd "$root"
config=configs/federation.json two_stages=configs/federation_two_stages.json runs=runs/federation
mkdir -p runs
[ -e runs/federation.key ] || "$PYTHON" -m megatron_noloco keys runs/federation.key
check_config "$config" 1
check_config "$two_stages" 2
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
rm -rf "$runs"
mkdir -p "$runs"

start() { # REPLICA RANKS: starts its job in the background; sets job
    if [ "$2" = 1 ]; then
        "$PYTHON" -m megatron_noloco train "$config" --replica "$1" --progress lines \
            >>"$runs/replica_$1.log" 2>&1 </dev/null &
    else
        "$root/launch/torchrun.sh" "$2" "$two_stages" --replica "$1" --progress lines \
            >>"$runs/replica_$1.log" 2>&1 </dev/null &
    fi
    job=$!
}

steps() { # REPLICA: the local steps that it has logged
    tail -n 1 "$runs/replica_0$1/metrics.jsonl" 2>/dev/null | sed -n 's/.*"step": \([0-9]*\),.*/\1/p'
}

reach() { # REPLICA STEP: waits until it has logged this step, or its job has ended
    until [ "$(steps "$1" || true)" -ge "$2" ] 2>/dev/null; do
        kill -0 "$job" 2>/dev/null || { echo "replica $1 has ended: see $runs/replica_$1.log" >&2; exit 1; }
        sleep 0.2
    done
}

echo "federation: three jobs are starting, the second with two ranks; their logs are $runs/replica_*.log"
trap 'kill $first $second $job 2>/dev/null || true' EXIT
first='' second='' job=''
start 0 1; first=$job
start 1 2; second=$job
start 2 1
reach 2 60
kill -9 "$job"
wait "$job" 2>/dev/null || true
killed=$(steps 2)
echo "replica 2 was killed at step $killed"
job=$first
reach 0 120
start 2 2
echo "replica 2 is started again, with two ranks; the others are at step $(steps 0)"
for job in "$first" "$second" "$job"; do
    wait_for_job "$job"
    [ "$code" = 0 ] || { echo "a job has failed: see $runs/replica_*.log" >&2; exit 1; }
done
trap - EXIT
for replica in 0 1 2; do
    echo "replica $replica:"
    grep -E '^ continuing at|^continuing from|^ taken over|^ state after' "$runs/replica_$replica.log" || true
    echo "  rounds skipped because of another replica: $(grep -c '^ round .* skipped |' "$runs/replica_$replica.log")"
    grep 'validation loss, replica' "$runs/replica_$replica.log" || true
done
grep -hoE 'replica [0-9]+ .* [0-9.]+ nats' "$runs"/replica_?.log | grep -oE '[0-9.]+ nats' | sort -n |
    awk 'NR == 1 { least = $1 } END { exit NR != 3 || $1 - least > 0.0002 }' ||
    { echo "the replicas have not ended as one model: see $runs/replica_*.log" >&2; exit 1; }
"$PYTHON" -m tools.efficiency "$runs"
