#!/bin/sh
# Train under Slurm: a template for sbatch. Change the marked lines.
#   usage: sbatch launch/slurm.sh CONFIG [options of `train`]      from the root of the repository
# A run that reaches its time limit saves, stops, and goes back into the queue; so it does when it is preempted. It
# then continues from its checkpoint. When it has finished, or failed, it does not.
#SBATCH --job-name=noloco
#SBATCH --nodes=4                # change: nodes x tasks per node = replicas x pipeline x data x tensor parallel sizes
#SBATCH --ntasks-per-node=8      # change: one task per GPU
#SBATCH --gpus-per-node=8        # change; remove for CPUs
#SBATCH --cpus-per-task=8        # change
#SBATCH --time=24:00:00          # change
#SBATCH --signal=B:USR1@300      # five to six minutes before the end, to this script: save, stop, back into the queue
#SBATCH --requeue                # after a preemption, or the end of a node
#SBATCH --open-mode=append       # the log goes on where it was
#SBATCH --output=noloco-%j.log
set -eu
[ $# -ge 1 ] || { echo "usage: sbatch launch/slurm.sh CONFIG [options of train]" >&2; exit 2; }
config=$1
shift
# Slurm runs a copy of this script, so paths are relative to where sbatch was called.
root=${SLURM_SUBMIT_DIR:-$PWD}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-$root/.venv/bin/python} # change: or `module load` here, and PYTHON=python3

# Exchanges use the slow network between islands; select its interface if a node has several.
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 OMPI_MCA_btl_tcp_if_include=eth0

# Where rank 0 listens if MPI does not connect the ranks: this script runs on the first host.
export MASTER_ADDR="${MASTER_ADDR:-$(hostname)}"
export MASTER_PORT="${MASTER_PORT:-$((15000 + ${SLURM_JOB_ID:-0} % 15000))}" # below the ephemeral ports
# shellcheck source=launch/wait.sh
. "$root/launch/wait.sh"

# Lets messages over TCP move while the ranks compute (noloco.overlap_steps). Intel MPI: I_MPI_ASYNC_PROGRESS=1.
export OMPI_MCA_btl_tcp_progress_thread=1

"$python" -m megatron_noloco config --check "$config" --world-size "$SLURM_NTASKS"

# Since Slurm 22.05 srun does not take this number over from sbatch: each task would have one core.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

# `srun --mpi=list` shows what the site supports. Without pmix, or if mpi4py's library does not work with it, use
# --mpi=none: exchanges then use torch.distributed.
requeue=no
# SIGUSR1 for all ranks: they save and leave with 0.
trap 'requeue=yes; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
srun --mpi=pmix --kill-on-bad-exit=1 "$python" -m megatron_noloco train "$config" "$@" &
wait_for_job $!
# Before a preemption Slurm sends SIGTERM to the ranks, and a job that then ends by itself within the partition's
# GraceTime is finished for Slurm.
case $(scontrol show job "$SLURM_JOB_ID") in *PreemptTime=[0-9]*) code=0 requeue=yes ;; esac
if [ "$requeue" = yes ] && [ "$code" = 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
