#!/bin/sh
# Train under torchrun, on one host or several, without MPI: exchanges use torch.distributed.
#   usage: launch/torchrun.sh N CONFIG [options of `train`]
#   N      processes on each host, one per GPU; N x NNODES = replicas x pipeline x data x tensor parallel sizes
#   NNODES, RENDEZVOUS  on several hosts: their number, and HOST:PORT of one of them; start this script on each
#   NIC    the network interface to use, such as eth0; without it gloo and NCCL each choose
set -eu
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"
[ $# -ge 2 ] || usage
ranks=$1 config=$2
check_number "$ranks"
shift 2
check_config "$config" $((ranks * ${NNODES:-1}))

if [ -n "${NIC:-}" ]; then export GLOO_SOCKET_IFNAME="$NIC" NCCL_SOCKET_IFNAME="$NIC"; fi
if [ "${NNODES:-1}" -gt 1 ]; then
    where="--nnodes $NNODES --rdzv-backend c10d --rdzv-endpoint ${RENDEZVOUS:?set it to HOST:PORT of one host}"
else
    where=--standalone
fi
# job.torchrun is torchrun with the exit code of the ranks, which divide the cores: on SIGTERM they finish their step, save and end the job with
# 0. A second one ends it at once.
ask_job() { kill -TERM "$job"; }
end_job() { kill -QUIT "$job"; kill -TERM "$job"; } # QUIT, which shells have it ignore, is lost until its imports are done
# shellcheck disable=SC2086  # several options in one variable
run_job "$PYTHON" -m megatron_noloco.job.torchrun $where --nproc-per-node "$ranks" \
    -m megatron_noloco train "$config" "$@"
exit "$code"
