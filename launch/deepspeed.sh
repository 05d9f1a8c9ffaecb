#!/bin/sh
# Train under DeepSpeed's launcher, on one host or several.
#   usage: launch/deepspeed.sh N CONFIG [options of `train`]
#   N         processes on this host, or on each host of HOSTFILE; one per GPU
#   HOSTFILE  lines like "node1 slots=8"; by default the hosts that PBS, LSF or Slurm has allocated
#   NODE_RANK  without ssh: this command on every host of HOSTFILE, with NODE_RANK 0 on the first one, 1 on the next
#   LAUNCHER  how DeepSpeed reaches the hosts: pdsh (the default, over ssh), openmpi, slurm or mpich. Exchanges use MPI
#             with openmpi and mpich, torch.distributed with the others
#   LAUNCHER_ARGS  more options of that launcher, such as "--mpi=pmix" of srun, with which exchanges use MPI there too
#   PORT      rendezvous port, default 29500; two jobs on a host need different ports
#   NIC       the network interface to use, such as eth0; without it gloo and NCCL each choose. openmpi needs it
set -eu
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"
[ $# -ge 2 ] || usage
ranks=$1 config=$2
check_number "$ranks"
shift 2
launcher=${LAUNCHER:-pdsh} asked=LAUNCHER=${LAUNCHER:-pdsh}
hosts_of_scheduler ' slots=' "$ranks"
check_hostfile
case $launcher in
pdsh | openmpi | slurm | mpich) ;;
*)
    echo "LAUNCHER=$launcher is unknown: it must be pdsh, openmpi, slurm or mpich" >&2
    exit 2
    ;;
esac
if [ -n "${NODE_RANK:-}" ]; then launcher=none asked=NODE_RANK=$NODE_RANK; fi
if [ "$launcher" != pdsh ] && [ -z "${HOSTFILE:-}" ]; then
    echo "$asked needs HOSTFILE, with a line like \"node1 slots=$ranks\" for each host" >&2
    exit 2
fi
case ${NODE_RANK:-0} in
*[!0-9]*) known= ;;
*) known=$((${NODE_RANK:-0} < hosts)) ;;
esac
if [ "$known" != 1 ]; then
    echo "NODE_RANK=$NODE_RANK: HOSTFILE=$HOSTFILE names hosts 0 to $((hosts - 1))" >&2
    exit 2
fi
if [ -n "${NIC:-}" ]; then export GLOO_SOCKET_IFNAME="$NIC" NCCL_SOCKET_IFNAME="$NIC"; fi
mpirun_of() { # KIND NAME: DeepSpeed calls the first mpirun on PATH
    find_mpirun
    if [ "$mpi" != "$1" ]; then
        echo "LAUNCHER=$launcher needs the mpirun of $2, which $mpirun is not: set MPIRUN" >&2
        exit 2
    fi
}
set -- train "$config" "$@"
ask_job() { kill -USR1 "-$job"; } # the ranks, by way of their launcher
end_job() { kill -KILL "-$job"; }
launcher_args=''
case $launcher in
none) set -- --no_ssh --node_rank "$NODE_RANK" --num_gpus "$ranks" --module megatron_noloco "$@" ;;
pdsh)
    if [ -n "${HOSTFILE:-}" ]; then
        ask_job() { "$PYTHON" -m megatron_noloco stop "$config" || end_job; }
        end_job() { kill -TERM "-$job"; }
    fi
    if [ -n "${NIC:-}" ]; then # on the command line: DeepSpeed does not pass these variables to other hosts
        set -- --no_python env "GLOO_SOCKET_IFNAME=$NIC" "NCCL_SOCKET_IFNAME=$NIC" "$PYTHON" -u -m megatron_noloco "$@"
    else
        set -- --module megatron_noloco "$@"
    fi
    set -- --num_gpus "$ranks" "$@"
    ;;
openmpi)
    [ -n "${NIC:-}" ] || { echo "LAUNCHER=openmpi needs NIC: DeepSpeed would take eth0" >&2; exit 2; }
    mpirun_of openmpi "Open MPI"
    launcher_args="$mpi_options --mca btl_tcp_if_include $NIC -x GLOO_SOCKET_IFNAME"
    set -- --module megatron_noloco "$@"
    ;;
slurm)
    ask_job() { kill -TERM "-$job"; }
    launcher_args="--kill-on-bad-exit=1"
    set -- "$root/launch/train.py" "$@" # DeepSpeed forgets that it is a module
    ;;
mpich)
    mpirun_of other MPICH
    launcher_args="${NIC:+-iface $NIC}"
    set -- "$root/launch/train.py" "$@" # as with slurm
    ;;
esac
if [ "$launcher" != pdsh ]; then # otherwise DeepSpeed asks the first host for its address, by ssh
    first=$(awk '{ print $1; exit }' "$HOSTFILE")
    set -- --force_multi --no_ssh_check --master_addr "$first" "$@"
fi

check_config "$config" $((ranks * hosts)) # takes seconds: the settings above come first

# On SIGINT or SIGTERM the ranks receive SIGUSR1, which DeepSpeed's own processes ignore: they finish their step, save
# and end the job with 0. srun forwards SIGTERM only: the ranks have as long as Slurm gives them. pdsh forwards no
# signal, and DeepSpeed answers one by killing the ranks of all hosts: so a file requests the stop. A second Ctrl-C ends
# them at once.
# --no_local_rank: otherwise DeepSpeed inserts --local_rank=K before `train`; LOCAL_RANK has the same value.
trap '' USR1
after_job() {
    while kill -0 "-$job" 2>/dev/null; do sleep 0.2; done
    if [ "$code" -gt 192 ]; then code=$((384 - code)); fi # DeepSpeed's -9 for SIGKILL, which is 137 elsewhere
}
run_job "$PYTHON" -m deepspeed.launcher.runner ${HOSTFILE:+--hostfile "$HOSTFILE"} --launcher "$launcher" \
    --launcher_args="$launcher_args ${LAUNCHER_ARGS:-}" --master_port "${PORT:-29500}" --log_level warning \
    --no_local_rank "$@"
exit "$code"
