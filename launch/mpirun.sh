#!/bin/sh
# Train under mpirun, on one host or several.
#   usage: launch/mpirun.sh N CONFIG [options of `train`]
#   N         all processes: replicas x pipeline x data x tensor parallel sizes, one per GPU
#   HOSTFILE  lines like "node1 slots=8"; by default the hosts that PBS or LSF has allocated, and without these all
#             processes run on this host, possibly several per core
#   NIC       the network interface to use, such as eth0 or ib0; without it MPI, gloo and NCCL each choose
#   MPI_OPTIONS  more options of mpirun, such as "-x NCCL_DEBUG=INFO"
# On several hosts the repository and the Python environment must have the same path everywhere.
set -eu
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"
[ $# -ge 2 ] || usage
ranks=$1 config=$2
check_number "$ranks"
shift 2
find_mpirun
if [ "$mpi" = openmpi ]; then hosts_of_scheduler ' slots='; else hosts_of_scheduler ':'; fi
check_hostfile
check_config "$config" "$ranks" # takes seconds: the settings above come first

if [ -n "${NIC:-}" ]; then export GLOO_SOCKET_IFNAME="$NIC" NCCL_SOCKET_IFNAME="$NIC"; fi
hostfile='' # the option; HOSTFILE itself may contain spaces
if [ "$mpi" = openmpi ]; then
    mpi_options="$mpi_options${NIC:+ --mca btl_tcp_if_include $NIC}"
    if [ -n "${HOSTFILE:-}" ]; then # ssh does not pass the environment: name the variables
        hostfile=--hostfile
        mpi_options="$mpi_options $mpi_progress -x PYTHONPATH"
        mpi_options="$mpi_options${NIC:+ -x GLOO_SOCKET_IFNAME -x NCCL_SOCKET_IFNAME}"
    else
        mpi_options="$mpi_options --oversubscribe"
    fi
else # MPICH and its derivatives
    mpi_options="${NIC:+ -iface $NIC}"
    if [ -n "${HOSTFILE:-}" ]; then hostfile=-machinefile; fi
fi

# mpirun gives every rank a terminal of its own, so only this script can see whether the output is a terminal.
progress=lines
if [ -t 1 ]; then
    progress=bar
    mpi_options="$mpi_options $mpi_unbuffered"
    columns=$(stty size 0<&1 2>/dev/null | cut -d ' ' -f 2)
    if [ "${columns:-0}" -gt 0 ]; then export COLUMNS="$columns"; fi
fi
# On SIGINT or SIGTERM mpirun kills its ranks within a second, but it forwards SIGUSR1 to all of them: they finish
# their step, save and end the job. A second Ctrl-C ends it at once.
# shellcheck disable=SC2086  # several options in one variable
run_job "$mpirun" $mpi_options ${hostfile:+"$hostfile" "$HOSTFILE"} ${MPI_OPTIONS:-} -n "$ranks" \
    "$PYTHON" -m megatron_noloco train "$config" --progress "$progress" "$@"
exit "$code"
