"""The launch scripts on two hosts with a network between them."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from megatron_noloco.config import RunConfig
from tests.kit.launched import Launched, launched
from tests.kit.ranks import REPOSITORY, run_launcher, run_ranks, two_hosts
from tests.kit.tiny import metrics, run_whole, tiny, write_config, write_text
from tests.netlab.lab import NIC, Lab

PATIENCE_SECONDS = 300
FIGURES = (
    "step",
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "total/sent_bytes",
    "total/routed_bytes",
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Lab]:
    with two_hosts() as both:
        yield both


def write_run(folder: Path, steps: int = 4) -> str:
    """A config whose two replicas of two stages exchange weights, and activations and gradients."""
    changes = {
        "parallel": {"replicas": 2, "pipeline_model_parallel_size": 2},
        "model": {"num_layers": 2},
        "data": {"text": write_text(folder)},
        "training": {"train_iters": steps, "output_dir": str(folder / "run")},
        "checkpoint": {"save_interval": 4},
        "evaluation": {"iters": 1},
    }
    return write_config(folder, tiny(changes))


def figures(folder: Path) -> list[list[list[object]]]:
    return [[[row[name] for name in FIGURES] for row in replica] for replica in metrics(folder / "run")]


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[object]]]:
    """Of a run over torch: the transport changes none of them."""
    folder = tmp_path_factory.mktemp("one_host")
    run_ranks(4, run_whole, write_run(folder), timeout=PATIENCE_SECONDS)
    return figures(folder)


def succeeded(finished: CompletedProcess[str]) -> str:
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    return finished.stdout


def launch(hosts: Lab, name: str, script: str, ranks: int, config: str, **environ: str) -> str:
    command = hosts.on(name, str(REPOSITORY / "launch" / script), str(ranks), config)
    return succeeded(
        run_launcher(command, PATIENCE_SECONDS, {"PYTHON": sys.executable, "NIC": NIC, **environ})
    )


def crossed(hosts: Lab, before: int, folder: Path) -> bool:
    """Whether the first host, which is the first replica, sent what that replica says it sent to the other."""
    last = metrics(folder / "run")[0][-1]
    sent = hosts.sent_bytes(hosts.names[0]) - before
    return sent >= last["total/sent_bytes"] + last["total/routed_bytes"] > 0


def on_hosts(
    hosts: Lab, script: str, ranks: int, config: str, environs: list[dict[str, str]], log: Path
) -> AbstractContextManager[Launched]:
    """The script on as many hosts as there are environments."""
    on = [partial(hosts.on, name) for name in hosts.names[: len(environs)]]
    with_nic = ({"NIC": NIC, "GLOO_SOCKET_IFNAME": NIC, "PORT": "29500"} | environ for environ in environs)
    return launched(script, ranks, config, *with_nic, log=log, on=on)


def test_mpirun_with_a_hostfile(hosts: Lab, on_one_host: list[list[list[object]]], tmp_path: Path) -> None:
    """The remote shell passes no environment: OMP_NUM_THREADS is set on the first host only."""
    config, before = write_run(tmp_path), hosts.sent_bytes(hosts.names[0])
    told = launch(
        hosts, hosts.names[0], "mpirun.sh", 4, config, HOSTFILE=str(hosts.hostfile), **hosts.environ
    )
    assert "started by mpirun; exchanges over mpi" in told
    assert figures(tmp_path) == on_one_host
    assert crossed(hosts, before, tmp_path)


@pytest.mark.slow
def test_hosts_are_sites_where_the_config_says_so(hosts: Lab, tmp_path: Path) -> None:
    """Two replicas on each: pairs are on one host in the first round of two, and across hosts in the second."""
    changes = {
        "noloco": {"local_steps": 1, "routing": "off", "sites": "hosts", "pairing": "auto"},
        "parallel": {"replicas": 4},
        "data": {"text": write_text(tmp_path)},
        "training": {"train_iters": 4, "log_interval": 1, "output_dir": str(tmp_path / "run")},
    }
    config = write_config(tmp_path, tiny(changes))
    launch(hosts, hosts.names[0], "mpirun.sh", 4, config, HOSTFILE=str(hosts.hostfile), **hosts.environ)
    rows = [[row for row in replica if "round/partners" in row] for replica in metrics(tmp_path / "run")]
    partners = [[row["round/partners"] for row in replica] for replica in rows]
    on_one_host = [[{one, *others} in ({0, 1}, {2, 3}) for others in of] for one, of in enumerate(partners)]
    assert on_one_host == [[True, False, True, False]] * 4


def test_the_doctor_exchanges_between_them(hosts: Lab) -> None:
    options = ["doctor", "--hostfile", str(hosts.hostfile), "--json"]
    command = hosts.on(hosts.names[0], sys.executable, "-m", "megatron_noloco", *options)
    finished = run_launcher(
        command, PATIENCE_SECONDS, {"PYTHONPATH": str(REPOSITORY), "NIC": NIC, **hosts.environ}
    )
    findings = json.loads(succeeded(finished))["findings"]
    (measured,) = (finding["figures"] for finding in findings if finding["figures"])
    assert measured["over"] == "tcp"
    assert measured["gb_per_second"] > 0


@pytest.fixture(scope="module")
def host_of(hosts: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Where launch/mpirun.sh puts each of four ranks, as they tell themselves instead of training."""
    python = tmp_path_factory.mktemp("placement") / "python"
    python.write_text('#!/bin/sh\n[ "$3" != train ] || echo "at $OMPI_COMM_WORLD_RANK $(hostname)"\n')
    python.chmod(0o755)
    environ = {"PYTHON": str(python), "MPIRUN": str(Path(sys.executable).parent / "mpirun")}
    told = launch(
        hosts,
        hosts.names[0],
        "mpirun.sh",
        4,
        "a.json",
        HOSTFILE=str(hosts.hostfile),
        **hosts.environ,
        **environ,
    )
    places = [line.split()[1:] for line in told.splitlines() if line.startswith("at ")]
    assert len(places) == 4, told
    return {int(rank): host for rank, host in places}


# The layouts of docs/launchers.md: what `parallel` says, and the replicas of each of two hosts with two slots.
LAYOUTS = {
    "several replicas per node": ({"replicas": 4}, [{0, 1}, {2, 3}]),
    "one replica per node": ({"replicas": 2, "pipeline_model_parallel_size": 2}, [{0}, {1}]),
    "one replica over several nodes": (
        {"replicas": 1, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}, [{0}, {0}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_which_replicas_a_host_has(hosts: Lab, host_of: dict[int, str], layout: str) -> None:
    parallel, expected = LAYOUTS[layout]
    topology = RunConfig(**tiny({"parallel": parallel})).topology(4)
    positions = {
        name: [topology.position(rank) for rank in host_of if host_of[rank] == name] for name in hosts.names
    }
    assert [{at.replica for at in positions[name]} for name in hosts.names] == expected
    for name in hosts.names:
        stages = {(at.replica, at.stage) for at in positions[name]}
        assert len(stages) * topology.tp == 2, "tensor parallelism does not leave a host"


@pytest.fixture
def slots(hosts: Lab, tmp_path: Path) -> str:
    """DeepSpeed's hostfile."""
    path = tmp_path / "hosts"
    path.write_text("".join(f"{name} slots=2\n" for name in hosts.names))
    return str(path)


@pytest.mark.slow
def test_deepspeeds_launcher_of_this_mpi(
    hosts: Lab, slots: str, on_one_host: list[list[list[object]]], tmp_path: Path
) -> None:
    """Open MPI's, or MPICH's when the Python that runs the tests has that beside it."""
    config, before = write_run(tmp_path), hosts.sent_bytes(hosts.names[0])
    name = "openmpi" if hosts.launcher.open_mpi else "mpich"
    environ = {"LAUNCHER": name, "HOSTFILE": slots, **hosts.environ}
    told = launch(hosts, hosts.names[0], "deepspeed.sh", 2, config, **environ)
    assert "started by mpirun; exchanges over mpi" in told
    assert figures(tmp_path) == on_one_host
    assert crossed(hosts, before, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["mpirun.sh", "torchrun.sh", "deepspeed.sh"])
def test_a_job_on_both_that_was_killed_continues(script: str, hosts: Lab, slots: str, tmp_path: Path) -> None:
    """A rank of the second host is killed, which ends the job on both; then it is started again."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in (undisturbed, killed):
        folder.mkdir()
    run_ranks(4, run_whole, write_run(undisturbed, steps=60), timeout=PATIENCE_SECONDS)
    config, before = write_run(killed, steps=60), hosts.sent_bytes(hosts.names[0])
    ranks, environs = {
        "mpirun.sh": (4, [{"HOSTFILE": str(hosts.hostfile), **hosts.environ}]),
        "torchrun.sh": (2, 2 * [{"NNODES": "2", "RENDEZVOUS": f"{hosts.names[0]}:29400"}]),
        "deepspeed.sh": (2, [{"HOSTFILE": slots, "NODE_RANK": rank} for rank in "01"]),
    }[script]
    with on_hosts(hosts, script, ranks, config, environs, tmp_path / "killed.log") as run:
        run.wait_until((killed / "run" / "checkpoints" / "latest").exists)
        second = f"/proc/{hosts.pids[1]}/ns/net"
        victims = [rank for rank in run.ranks() if os.path.samefile(f"/proc/{rank.pid}/ns/net", second)]
        victims[0].kill()
        assert 0 not in [process.wait(PATIENCE_SECONDS) for process in run.processes]
        run.wait_until(lambda: not run.ranks())
    with on_hosts(hosts, script, ranks, config, environs, tmp_path / "log") as run:
        run.ends()
    name = script.removesuffix(".sh")
    told = f"started by {name}; exchanges over {'mpi' if name == 'mpirun' else 'torch'}"
    assert told in " ".join(run.said.split())
    assert figures(killed) == figures(undisturbed)
    assert crossed(hosts, before, killed)


@pytest.mark.slow
def test_a_stop_of_one_deepspeed(hosts: Lab, slots: str, tmp_path: Path) -> None:
    """A signal for the script on the first of two hosts, on which it was started on each."""
    config = write_run(tmp_path, steps=100_000)
    environs = [{"HOSTFILE": slots, "NODE_RANK": rank} for rank in "01"]
    with on_hosts(hosts, "deepspeed.sh", 2, config, environs, tmp_path / "log") as run:
        run.wait_until("iteration      5/100000")
        run.processes[0].terminate()
        run.ends()
    assert "(SIGUSR1); the same command continues from there" in " ".join(run.said.split())
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
