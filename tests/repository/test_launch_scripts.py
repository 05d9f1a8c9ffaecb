"""The launch scripts: sound shell, every file they name is there, and mistakes end in one clear line."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from megatron_noloco.config import load_config
from tests.kit.launched import run_launch_script, said_by
from tests.kit.ranks import REPOSITORY

SCRIPTS = sorted(path.name for path in (REPOSITORY / "launch").glob("*.sh"))
SOURCED = ("common.sh", "wait.sh")
LAUNCHERS = ("mpirun.sh", "torchrun.sh", "deepspeed.sh")
ROOT_FOLDERS = ("configs", "docs", "launch", "tools")
CONFIG = "configs/quickstart.json"
_NAMED_FILE = re.compile(rf"\b(?:{'|'.join(ROOT_FOLDERS)})/[\w./-]*\w|\brequirements[\w-]*\.txt")


def named_files(text: str) -> set[str]:
    """Files of the repository that a script or a recipe names."""
    return set(_NAMED_FILE.findall(text))


def found_first(folder: Path) -> dict[str, str]:
    """Return the variables by which a script finds the programs of a folder."""
    programs = {name.upper(): str(folder / name) for name in ("python", "mpirun")}
    return {**programs, "PATH": f"{folder}:{os.environ['PATH']}"}


def write_programs(folder: Path, content: Mapping[str, str]) -> None:
    """Stand-ins, by their names."""
    for name, lines in content.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_sound_shell_and_can_be_executed(script: str) -> None:
    path = REPOSITORY / "launch" / script
    finished = subprocess.run(["sh", "-n", path], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert script in SOURCED or os.access(path, os.X_OK)


@pytest.mark.parametrize("path", [*(f"launch/{script}" for script in SCRIPTS), "Makefile", ".ci/run"])
def test_files_that_scripts_name_exist(path: str) -> None:
    missing = {
        name for name in named_files((REPOSITORY / path).read_text()) if not (REPOSITORY / name).exists()
    }
    assert missing == set()


def test_quickstart_starts_as_many_ranks_as_its_config_needs() -> None:
    script = (REPOSITORY / "launch" / "quickstart.sh").read_text()
    match = re.search(r"mpirun\.sh (\d+) (\S+)", script)
    assert match is not None
    assert load_config(REPOSITORY / match[2]).topology(int(match[1])).world_size == int(match[1])


SHOW_HOSTFILE = """[ "$1" != --version ] || {{ echo '{version}'; exit; }}
while [ $# -gt 0 ]; do
    case $1 in --hostfile | -machinefile) paste -sd '|' "$2" >&2 ;; esac
    shift
done
"""


@pytest.mark.parametrize(
    ("variable", "version", "lines"),
    [
        ("PBS_NODEFILE", "mpirun (Open MPI) 5.0.11", "node1 slots=2|node2 slots=1"),
        ("LSB_DJOB_HOSTFILE", "HYDRA build details", "node1:2|node2:1"),
    ],
)
def test_the_hosts_of_a_scheduler(variable: str, version: str, lines: str, tmp_path: Path) -> None:
    (tmp_path / "slots").write_text("node1\nnode1\nnode2\n")
    write_programs(tmp_path, {"mpirun": SHOW_HOSTFILE.format(version=version)})
    environ = {variable: str(tmp_path / "slots"), "MPIRUN": str(tmp_path / "mpirun"), "TMPDIR": str(tmp_path)}
    environ["PYTHON"] = "true"  # which would check the config
    assert said_by("mpirun.sh", "8", CONFIG, environ=environ) == (0, f"{lines}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"slots", "mpirun"}, "nothing is left behind"


def test_mpirun_finds_the_programs_beside_it(tmp_path: Path) -> None:
    """That of Intel MPI starts another program by its name alone."""
    started = "[ $1 = --version ] || echo started >&2\n"
    write_programs(tmp_path, {"mpirun": "its.hydra $1\n", "its.hydra": started})
    environ = {"MPIRUN": str(tmp_path / "mpirun"), "PYTHON": "true"}
    assert said_by("mpirun.sh", "8", CONFIG, environ=environ) == (0, "started\n")


@pytest.mark.parametrize("where", ["launch", ".."])
def test_quickstart_starts_from_any_folder(where: str, tmp_path: Path) -> None:
    """On a copy whose mpirun.sh and Python only tell that they were called."""
    root = tmp_path / "a copy"
    shutil.copytree(REPOSITORY / "launch", root / "launch")
    write_programs(root / "launch", {"mpirun.sh": 'echo trained in $(basename "$PWD")\n'})
    write_programs(tmp_path, {"python": 'echo sampled in $(basename "$PWD") by $PYTHONPATH\n'})
    script = os.path.relpath(root / "launch" / "quickstart.sh", root / where)
    environ = {**os.environ, "PYTHON": str(tmp_path / "python"), "PYTHONPATH": ""}
    command = [f"./{script}" if "/" not in script else script]
    finished = subprocess.run(command, cwd=root / where, env=environ, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "trained in a copy\n" in finished.stdout
    assert finished.stdout.splitlines()[-1] == f"sampled in a copy by {root}"


@pytest.mark.parametrize("script", LAUNCHERS)
def test_a_script_without_arguments_says_its_usage(script: str) -> None:
    code, said = said_by(script)
    assert code == 2
    assert f"usage: launch/{script} N CONFIG" in said


def test_a_closed_terminal_asks_the_job_to_save(tmp_path: Path) -> None:
    """SIGHUP, which where it is ignored, as under nohup, a shell could not trap."""
    with started_and_hung_up(tmp_path, listening=8) as process:
        assert process.communicate(timeout=60) == (None, "asked\n")
    assert process.returncode == 3


def test_early_signal_ends_job_in_one_line(tmp_path: Path) -> None:
    with started_and_hung_up(tmp_path, listening=7) as process:
        line = "ended before the training began; the same command starts it again\n"
        assert process.communicate(timeout=60) == (None, line)
    assert process.returncode == 128 + signal.SIGHUP


@pytest.mark.parametrize("log", ["/dev/full", "a pipe without reader"])
def test_a_launcher_outlives_the_console(log: str, tmp_path: Path) -> None:
    """mpirun ends its job when it cannot write; the stand-in does at once."""
    writes = f'for line in 1 2 3; do echo "$line"; sleep 0.1; done\ntouch {tmp_path}/ended\n'
    write_programs(tmp_path, {"mpirun": f'[ "$1" != --version ] || exit 0\nset -e\n{writes}'})
    if log != "/dev/full":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(log, os.O_WRONLY)
    environ = {"PYTHON": "true", "MPIRUN": str(tmp_path / "mpirun")}
    finished = run_launch_script("mpirun.sh", "8", CONFIG, environ=environ, stdout=writer)
    os.close(writer)
    assert finished.stderr == "stdout cannot be written; training continues without its console\n"
    assert (finished.returncode, (tmp_path / "ended").exists()) == (0, True)


@contextmanager
def started_and_hung_up(folder: Path, listening: int) -> Iterator["subprocess.Popen[str]"]:
    """launch/mpirun.sh after SIGHUP; of the 8 ranks of its stand-in for mpirun, some already handle signals."""
    told = "".join(f'touch "$NOLOCO_LISTENING/{rank}"\n' for rank in range(listening))
    hangs = f"trap 'echo asked >&2; exit 3' USR1\n{told}echo started >&2\nwhile :; do sleep 0.05; done\n"
    write_programs(folder, {"mpirun": f'[ "$1" != --version ] || exit 0\n{hangs}'})
    with subprocess.Popen(
        [str(REPOSITORY / "launch" / "mpirun.sh"), "8", CONFIG],
        env={**os.environ, "PYTHON": "true", "MPIRUN": str(folder / "mpirun")},
        stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline() == "started\n"
        process.send_signal(signal.SIGHUP)
        yield process


RECORDED = {
    "pdsh": "pdsh -S -f 1024 -w node1,node2 {exports} cd {cwd}; {python} -u -m deepspeed.launcher.launch "
    "--world_info={world} --node_rank=%n --master_addr=node1 --master_port=29500 --no_python --no_local_rank "
    "{log} env GLOO_SOCKET_IFNAME=eth7 NCCL_SOCKET_IFNAME=eth7 "
    "{python} -u -m megatron_noloco train {config}",
    "slurm": "srun -n 8 --kill-on-bad-exit=1 --mpi=pmix {exports} {python} -u {root}/launch/train.py train "
    "{config}",
    "mpich": "mpirun -n 8 -ppn 4 -iface eth7 {exports} -hosts node1,node2 {python} -u {helper} --launcher mpich "
    "{root}/launch/train.py train {config}",
}


SHOW = """[ "$1" != --version ] || { echo HYDRA build details; exit; }
echo "$(basename "$0") $*"
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", RECORDED)
def test_what_deepspeed_starts(launcher: str, tmp_path: Path) -> None:
    """DeepSpeed's own runner, with launchers that only show how they are called. {name}: what differs here."""
    commands = dict.fromkeys(("srun", "sinfo", "pdsh", "mpirun"), SHOW)
    write_programs(tmp_path, commands | {"ssh": "echo node1\n", "scontrol": "printf 'node1\\nnode2\\n'\n"})
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=4\nnode2 slots=4\n")
    environ = found_first(tmp_path) | {"PYTHON": sys.executable, "NIC": "eth7", "DS_ACCELERATOR": "cpu"}
    environ |= {"LAUNCHER": launcher}
    if launcher == "slurm":
        environ |= {"SLURM_JOB_NODELIST": "node[1-2]", "LAUNCHER_ARGS": "--mpi=pmix"}
    else:
        environ |= {"HOSTFILE": str(hosts)}
    finished = run_launch_script("deepspeed.sh", "4", CONFIG, environ=environ, cwd=REPOSITORY, timeout=300)
    assert finished.returncode == 0, finished.stderr
    here = {"python": sys.executable, "config": CONFIG, "root": str(REPOSITORY)}
    parts = re.split(r"\{(\w+)\}", RECORDED[launcher])  # what is in braces has the odd places
    pattern = "".join(
        re.escape(here[part] if place % 2 else part) if part in here or not place % 2 else ".+"
        for place, part in enumerate(parts)
    )
    assert re.fullmatch(pattern, finished.stdout.strip()), finished.stdout


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_hostfile_of_windows_is_read(encoding: str, tmp_path: Path) -> None:
    """With a byte order mark, and carriage returns, which mpirun would take for parts of the names."""
    hosts = tmp_path / "hosts"
    hosts.write_bytes("node1 slots=4\r\nnode2 slots=4\r\n".encode(encoding))
    shows = """while [ "$1" != --hostfile ]; do shift; done\ncat "$2" >&2\n"""
    write_programs(
        tmp_path, {"mpirun": f"""[ "$1" != --version ] || {{ echo "Open MPI) 5"; exit; }}\n{shows}"""}
    )
    environ = found_first(tmp_path) | {"HOSTFILE": str(hosts), "PYTHON": "true", "TMPDIR": str(tmp_path)}
    said = (0, "node1 slots=4\nnode2 slots=4\n")
    assert said_by("mpirun.sh", "8", CONFIG, environ=environ) == said
    assert {path.name for path in tmp_path.iterdir()} == {"hosts", "mpirun"}, "nothing is left behind"


class Batch:
    """launch/slurm.sh with a scheduler that only records what it is told; its srun ends when it is signalled."""

    def __init__(self, folder: Path, code: int, preempted: str) -> None:
        self.folder = folder
        commands = {
            "srun": f'until [ -e "{folder}/signalled" ]; do sleep 0.05; done; exit {code}',
            "scancel": f'touch "{folder}/signalled"; sleep 0.5',  # srun ends before it
            "scontrol": f'[ "$1" = requeue ] || echo "   StartTime=2026-11-28T05:41:02 PreemptTime={preempted}"',
            "python": "",
        }
        told = {name: f'echo "{name} $*" >>"{folder}/told"\n{action}\n' for name, action in commands.items()}
        write_programs(folder, told)
        slurm = {"SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}
        command, environ = [str(REPOSITORY / "launch" / "slurm.sh"), CONFIG], found_first(folder) | slurm
        self.process = subprocess.Popen(command, env=os.environ | environ, start_new_session=True)

    def told(self) -> list[str]:
        path = self.folder / "told"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not any(line.startswith(name) for line in self.told()):
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.05)


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Callable[[int, str], Batch]]:
    started: list[Batch] = []

    def start(code: int, preempted: str) -> Batch:
        started.append(Batch(tmp_path, code, preempted))
        return started[-1]

    yield start
    for one in started:
        (one.folder / "signalled").touch()
        one.process.wait(60)


TRAIN = f"srun --mpi=pmix --kill-on-bad-exit=1 {{python}} -m megatron_noloco train {CONFIG}"


WARNED = "scancel --signal=USR1 77"
ASKED = "scontrol show job 77"
REQUEUED = "scontrol requeue 77"


@pytest.mark.parametrize(
    ("code", "warned", "preempted", "then"),
    [
        (0, True, "None", [WARNED, ASKED, REQUEUED]),
        (1, True, "None", [WARNED, ASKED]),  # it could not save
        (0, False, "None", [ASKED]),
        (0, False, "2026-11-28T05:41:05", [ASKED, REQUEUED]),
        (143, False, "2026-11-28T05:41:05", [ASKED, REQUEUED]),  # before the training began
    ],
    ids=["its time is over", "failed", "finished", "preempted", "preempted at its start"],
)
def test_a_batch_job_whose_time_is_over_goes_back_into_the_queue(
    code: int, warned: bool, preempted: str, then: list[str], batch: Callable[[int, str], Batch]
) -> None:
    job = batch(code, preempted)
    job.wait_for("srun")
    if warned:
        job.process.send_signal(signal.SIGUSR1)
    else:
        (job.folder / "signalled").touch()
    assert job.process.wait(60) == (0 if REQUEUED in then else code)
    _, *told = job.told()
    assert told == [TRAIN.format(python=job.folder / "python"), *then]


def test_slurm_is_told_to_warn_the_script_and_to_requeue() -> None:
    lines = (REPOSITORY / "launch" / "slurm.sh").read_text().splitlines()
    options = [line.split()[1] for line in lines if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=B:USR1@300", "--open-mode=append"} <= set(options)


def test_setup_refuses_the_environment_of_another_copy(tmp_path: Path) -> None:
    """As after a link to its .venv: the other copy would import this one."""
    for folder in ("bin", "site", "other/megatron_noloco"):
        (tmp_path / folder).mkdir(parents=True)
    write_programs(tmp_path / "bin", {"python": f'[ "$1" != -c ] || echo {tmp_path}/site\n'})
    (tmp_path / "site" / "megatron_noloco.pth").write_text(f"{tmp_path}/other\n")
    code, said = said_by("setup.sh", environ={"VENV": str(tmp_path)})
    assert code == 1
    assert said == (
        f"set-up: {tmp_path} is the environment of {tmp_path}/other; remove the link, or name another one with "
        "VENV\n"
    )


def test_a_notice_makes_the_job_leave(tmp_path: Path) -> None:
    """The command fails, then takes too long, and is killed with its child, and then ends with 0."""
    programs = {
        "python": 'echo "told:" "$@"\n',
        "sleep": "exec /bin/sleep 0.01\n",
        "timeout": 'shift 3; exec /usr/bin/timeout -k 1 0.3 "$@"\n',
    }
    write_programs(tmp_path, programs)
    ran = tmp_path / "ran"
    alone = f"exec 9> {tmp_path / 'lock'}; flock -n 9"  # which a child that lives holds
    tries = f"echo >> {ran}; case $(wc -l < {ran}) in 1) false;; 2) /bin/sleep 60 | cat;; esac"
    command = f"{alone} && {{ {tries}; }}"
    finished = run_launch_script("notice.sh", "a run", command, environ=found_first(tmp_path))
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.splitlines()[-1] == "told: -m megatron_noloco stop --leave a run"
    assert ran.read_text() == "\n" * 3
