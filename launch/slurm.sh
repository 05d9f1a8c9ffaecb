#!/bin/sh
# Train under Slurm: a template for sbatch. Change what is marked; the rest can stay.
#   usage: sbatch launch/slurm.sh CONFIG [options of `train`]      from the root of the repository
#SBATCH --job-name=noloco
#SBATCH --nodes=4                # change: nodes x tasks per node = replicas x stages x lanes x shards
#SBATCH --ntasks-per-node=8      # change: one task per GPU
#SBATCH --gpus-per-node=8        # change; remove for CPUs
#SBATCH --cpus-per-task=8        # change
#SBATCH --time=24:00:00          # change
#SBATCH --signal=USR1@300        # five minutes before the end, or up to six: save and stop
#SBATCH --output=noloco-%j.log
set -eu
[ $# -ge 1 ] || { echo "usage: sbatch launch/slurm.sh CONFIG [options of train]" >&2; exit 2; }
config=$1
shift
# Slurm runs a copy of this script from its spool, so paths start where sbatch was called.
root=${SLURM_SUBMIT_DIR:-$PWD}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-$root/.venv/bin/python} # change: or `module load` here, and PYTHON=python3

# The slow network between islands is what the exchange crosses; pick its interface where a node has several.
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 OMPI_MCA_btl_tcp_if_include=eth0

"$python" -m megatron_noloco config --check "$config" --world-size "$SLURM_NTASKS"

# `srun --mpi=list` shows what the site has. Where it has no pmix, or mpi4py's library does not get on with it, take
# --mpi=none: exchanges then go over torch.distributed.
exec srun --mpi=pmix --kill-on-bad-exit=1 "$python" -m megatron_noloco train --config "$config" "$@"
