#!/bin/sh
# Tells a job of a federation to leave, when a command says that the cloud takes its machine back. Runs beside the job.
#   usage: launch/notice.sh RUN COMMAND
# RUN is the job's output_dir. COMMAND is a line for the shell, which runs every 5 seconds, and is killed after 10 seconds;
# exit code 0 is the notice. docs/faults.md has the COMMAND of two clouds.
set -eu
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"
[ $# = 2 ] || usage
echo "the job in $1 will be told to leave when this ends with 0: $2"
until timeout -k 1 10 sh -c "$2" >/dev/null 2>&1 </dev/null; do sleep 5; done
exec "$PYTHON" -m megatron_noloco stop --leave "$1"
