#!/bin/sh
# Train the quickstart: 4 replicas x 2 stages as 8 processes on this machine.
#   usage: launch/quickstart.sh [options of `train`]      (or: make quickstart)
set -eu
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"
cd "$root"
unset HOSTFILE NIC # this machine alone, whatever else the environment prepares
echo "quickstart: 8 processes are starting; on 2 cores that takes some 20 seconds, the training 4 minutes"
launch/mpirun.sh 8 configs/quickstart.json "$@"

# What the mean of the four models has learned to write in four minutes.
echo
echo "A sample of the mean model ($PYTHON -m megatron_noloco generate --checkpoint runs/quickstart ...):"
exec "$PYTHON" -m megatron_noloco generate --checkpoint runs/quickstart --prompt "def " --tokens 120
