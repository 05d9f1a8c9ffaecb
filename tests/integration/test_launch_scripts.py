"""The launch scripts: sound shell, every file they name is there, and mistakes end in one clear line."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.harness import REPOSITORY

SCRIPTS = sorted(path.name for path in (REPOSITORY / "launch").glob("*.sh"))
SOURCED = ("common.sh", "profile.sh")
LAUNCHERS = ("mpirun.sh", "torchrun.sh", "deepspeed.sh")
ROOT_FOLDERS = ("configs", "docs", "launch", "tools")
_NAMED_FILE = re.compile(rf"\b(?:{'|'.join(ROOT_FOLDERS)})/[\w./-]*\w|\brequirements[\w-]*\.txt")


def named_files(text: str) -> set[str]:
    """Files of the repository that a script or a recipe names."""
    return set(_NAMED_FILE.findall(text))


def launch(script: str, *arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and stderr; `PYTHON` is this interpreter unless `environ` says otherwise."""
    finished = subprocess.run(
        [str(REPOSITORY / "launch" / script), *arguments],
        env={**os.environ, "PYTHON": sys.executable, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return finished.returncode, finished.stderr


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_sound_shell(script: str, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    finished = subprocess.run([shell, "-n", REPOSITORY / "launch" / script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in SOURCED])
def test_script_can_be_executed(script: str) -> None:
    assert os.access(REPOSITORY / "launch" / script, os.X_OK)


@pytest.mark.parametrize("path", [*(f"launch/{script}" for script in SCRIPTS), "Makefile", ".ci/run"])
def test_named_files_exist(path: str) -> None:
    missing = {
        name for name in named_files((REPOSITORY / path).read_text()) if not (REPOSITORY / name).exists()
    }
    assert missing == set()


def test_quickstart_starts_as_many_ranks_as_its_config_needs() -> None:
    script = (REPOSITORY / "launch" / "quickstart.sh").read_text()
    match = re.search(r"mpirun\.sh (\d+) (\S+)", script)
    assert match is not None
    check = [sys.executable, "-m", "megatron_noloco", "config", "--check", match[2], "--world-size", match[1]]
    finished = subprocess.run(check, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
@pytest.mark.parametrize(
    ("script", "said_by_mpirun", "lines"),
    [
        ("mpirun.sh", "mpirun (Open MPI) 5.0.11", "node1 slots=2|node2 slots=1"),
        ("mpirun.sh", "HYDRA build details", "node1:2|node2:1"),
    ],
    ids=["Open MPI", "MPICH"],
)
def test_the_hosts_of_a_scheduler(
    variable: str, script: str, said_by_mpirun: str, lines: str, tmp_path: Path
) -> None:
    """A mpirun that only shows the hostfile that it is given."""
    (tmp_path / "slots").write_text("node1\nnode1\nnode2\n")
    (tmp_path / "mpirun").write_text(f"""#!/bin/sh
[ "$1" != --version ] || {{ echo '{said_by_mpirun}'; exit; }}
while [ $# -gt 0 ]; do
    case $1 in --hostfile | -machinefile) paste -sd '|' "$2" >&2 ;; esac
    shift
done
""")
    (tmp_path / "mpirun").chmod(0o755)
    environ = {variable: str(tmp_path / "slots"), "MPIRUN": str(tmp_path / "mpirun"), "TMPDIR": str(tmp_path)}
    code, said = launch(script, "8", "configs/quickstart.json", environ=environ)
    assert (code, said.strip()) == (0, lines)
    assert {path.name for path in tmp_path.iterdir()} == {"slots", "mpirun"}, "nothing is left behind"


def test_mpirun_finds_the_programs_beside_it(tmp_path: Path) -> None:
    """That of Intel MPI starts another program by its name alone."""
    (tmp_path / "mpirun").write_text("#!/bin/sh\nits.hydra $1\n")
    (tmp_path / "its.hydra").write_text("#!/bin/sh\n[ $1 = --version ] || echo started >&2\n")
    for name in ("mpirun", "its.hydra"):
        (tmp_path / name).chmod(0o755)
    environ = {"MPIRUN": str(tmp_path / "mpirun")}
    assert launch("mpirun.sh", "8", "configs/quickstart.json", environ=environ) == (0, "started\n")


@pytest.mark.parametrize("where", ["", "launch", ".."])
def test_quickstart_starts_from_any_folder(where: str, tmp_path: Path) -> None:
    """On a copy whose mpirun.sh and Python only tell that they were called."""
    root = tmp_path / "a copy"
    shutil.copytree(REPOSITORY / "launch", root / "launch")
    (root / "launch" / "mpirun.sh").write_text('#!/bin/sh\necho trained in $(basename "$PWD")\n')
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho sampled in $(basename "$PWD") by $PYTHONPATH\n')
    python.chmod(0o755)
    script = os.path.relpath(root / "launch" / "quickstart.sh", root / where)
    environ = {**os.environ, "PYTHON": str(python), "PYTHONPATH": ""}
    command = [f"./{script}" if "/" not in script else script]
    finished = subprocess.run(command, cwd=root / where, env=environ, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "trained in a copy\n" in finished.stdout
    assert finished.stdout.splitlines()[-1] == f"sampled in a copy by {root}"


@pytest.mark.parametrize("script", LAUNCHERS)
def test_a_launcher_explains_itself(script: str) -> None:
    code, said = launch(script)
    assert code == 2
    assert f"usage: launch/{script} N CONFIG" in said


@pytest.mark.parametrize("script", LAUNCHERS)
def test_a_wrong_number_of_ranks_starts_nothing(script: str) -> None:
    code, said = launch(script, "6", str(REPOSITORY / "configs" / "quickstart.json"))
    assert code == 2
    assert "6 ranks are not 4 replicas x pipeline 2" in said
    assert len(said.splitlines()) == 1


FAKE = """#!/bin/sh
[ "$1" != --version ] || { echo "mpirun (Open MPI) 5.0.11"; exit; }
[ "$1" != -m ] || exit 0
echo "$*"
env | grep -E "^(OMPI_MCA|UCX)_" | sort
"""
CONFIG = "configs/quickstart.json"


def commanded(script: str, folder: Path, profile: str, **environ: str) -> tuple[str, dict[str, str]]:
    """The command line of a fake mpirun or srun, and the variables of Open MPI and UCX that it finds."""
    for name in ("mpirun", "srun", "python"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "UCX_"))}
    variables = {
        **inherited, "PYTHON": str(folder / "python"), "PATH": f"{folder}:{os.environ['PATH']}",
        "MPIRUN": str(folder / "mpirun"), "SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_NTASKS": "8",
        "LAUNCH_PROFILE": profile, **environ,
    }  # fmt: skip
    arguments = [CONFIG] if script == "slurm.sh" else ["8", CONFIG]
    command = [str(REPOSITORY / "launch" / script), *arguments]
    finished = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    line, *found = finished.stdout.splitlines()
    return line, dict(variable.split("=", 1) for variable in found)


TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self,sm", "OMPI_MCA_btl_tcp_progress_thread": "1"}
INFINIBAND = {"OMPI_MCA_pml": "ucx", "OMPI_MCA_coll_hcoll_enable": "0", "UCX_TLS": "^tcp"}


@pytest.mark.parametrize(
    ("profile", "expected"), [("", {}), ("wan", TCP), ("ethernet", TCP), ("ib", INFINIBAND)]
)
def test_a_profile_is_what_mpirun_finds(profile: str, expected: dict[str, str], tmp_path: Path) -> None:
    line, found = commanded("mpirun.sh", tmp_path, profile, NIC="eth7")
    assert found == expected
    assert "--mca btl_tcp_if_include eth7" in line
    line, found = commanded("mpirun.sh", tmp_path, profile, HOSTFILE="hosts", UCX_NET_DEVICES="mlx5_0:1")
    assert found == expected | {"UCX_NET_DEVICES": "mlx5_0:1"}
    assert ("-x UCX_TLS -x UCX_NET_DEVICES" in line) == (profile == "ib"), "ssh passes no variables"


@pytest.mark.parametrize(("profile", "expected"), [("wan", TCP), ("ib", INFINIBAND)])
def test_a_profile_is_what_srun_finds(profile: str, expected: dict[str, str], tmp_path: Path) -> None:
    _, found = commanded("slurm.sh", tmp_path, profile)
    assert found == expected | {"OMPI_MCA_btl_tcp_progress_thread": "1"}


@pytest.mark.parametrize("script", [*LAUNCHERS, "slurm.sh"])
def test_an_unknown_profile_starts_nothing(script: str) -> None:
    environ = {"LAUNCH_PROFILE": "wlan", "SLURM_SUBMIT_DIR": str(REPOSITORY)}
    code, said = launch(script, "8", CONFIG, environ=environ)
    assert code == 2
    assert said == "LAUNCH_PROFILE=wlan is unknown: it must be wan, ethernet or ib\n"


def test_setup_refuses_a_python_that_is_not_there() -> None:
    code, said = launch("setup.sh", environ={"PYTHON": "python-of-nowhere"})
    assert code == 1
    assert "there is no python-of-nowhere here" in said


def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" != --version ] || echo Python 3.9.2\n[ "$1" != -c ]\n')
    old.chmod(0o755)
    code, said = launch("setup.sh", environ={"PYTHON": str(old)})
    assert code == 1
    assert said == (
        "set-up: Python 3.9.2 does not fit: Python 3.11, 3.12 or 3.13 is needed; name one with PYTHON=python3.12\n"
    )


def test_requirements_and_project_metadata_agree() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = set(project["dependencies"]).union(*project["optional-dependencies"].values())
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    installed = {line.partition("#")[0].strip() for line in lines} - {""}
    assert installed == declared
