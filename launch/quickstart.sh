#!/bin/sh
# Train the quickstart: 4 replicas x 2 stages as 8 processes on this machine.
#   usage: launch/quickstart.sh [options of `train`]      (or: make quickstart)
set -eu
cd "$(dirname "$0")/.."
unset HOSTFILE NIC # this machine alone, whatever else the environment prepares
echo "quickstart: 8 processes are starting; on 2 cores that takes some 20 seconds, the training 4 minutes"
exec launch/mpirun.sh 8 configs/quickstart.json "$@"
