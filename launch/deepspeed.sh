#!/bin/sh
# Train under DeepSpeed's launcher, on one host or several; exchanges use torch.distributed.
#   usage: launch/deepspeed.sh N CONFIG [options of `train`]
#   N         processes on this host, or on each host of HOSTFILE; one per GPU
#   HOSTFILE  lines like "node1 slots=8": DeepSpeed reaches the hosts by ssh, through pdsh; by default the hosts that
#             PBS or LSF has allocated
#   HOSTS     the number of hosts in HOSTFILE
#   PORT      rendezvous port, default 29500; two jobs on a host need different ports
#   NIC       the network interface to use, such as eth0; without it gloo and NCCL each choose
set -eu
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"
[ $# -ge 2 ] || usage
ranks=$1 config=$2
shift 2
hosts_of_scheduler ' slots='
check_config "$config" $((ranks * ${HOSTS:-1}))

if [ -n "${NIC:-}" ]; then # on the command line: DeepSpeed does not pass these variables to other hosts
    set -- --no_python env "GLOO_SOCKET_IFNAME=$NIC" "NCCL_SOCKET_IFNAME=$NIC" \
        "$PYTHON" -u -m megatron_noloco train --config "$config" "$@"
else
    set -- --module megatron_noloco train --config "$config" "$@"
fi
# On a signal, DeepSpeed's runner exits at once while its ranks continue. So all of them receive it here: they finish
# their step and save, within the 30 s that DeepSpeed allows. A second Ctrl-C ends them at once.
# --no_local_rank: otherwise DeepSpeed inserts --local_rank=K before `train`; LOCAL_RANK has the same value.
setsid "$PYTHON" -m deepspeed.launcher.runner ${HOSTFILE:+--hostfile "$HOSTFILE"} --num_gpus "$ranks" \
    --master_port "${PORT:-29500}" --log_level warning --no_local_rank "$@" </dev/null &
job=$!
trap 'kill -TERM "-$job"; trap "kill -KILL -$job" INT TERM' INT TERM
wait_for_job "$job"
while kill -0 "-$job" 2>/dev/null; do sleep 0.2; done
exit "$code"
