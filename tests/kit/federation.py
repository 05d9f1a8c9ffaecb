"""Jobs of a federation on this machine, each the command line in processes of its own.

They are forked, so that the engines' imports are paid for once.
"""

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.cli.main import main
from megatron_noloco.federation import membership
from megatron_noloco.job import leaving
from tests.kit.ranks import free_port, key_file
from tests.kit.tiny import TINY, tiny, write_config
from tools.faults.replica import pause

LONGEST_SECONDS = 400.0  # where other work shares the cores
_LOOK_SECONDS = 0.02
_WHERE = signal.SIGRTMIN  # has a job write where its threads are


def begin_alone(pause_seconds: float = 0.0) -> None:
    """Let a job, as its `disturb`, wait for no other one at its start, and pause in each local step."""
    membership.FIRST_SECONDS = 0.0
    if pause_seconds:
        pause(pause_seconds)


class Federation:
    """A config for all jobs, and the jobs that run. As a context: none is left behind.

    Args:
        apart: each job has an `output_dir` of its own, as on machines that share nothing.
        base: what `changes` are changes of.
    """

    def __init__(
        self, folder: Path, changes: Mapping[str, Any], apart: bool = False, base: Mapping[str, Any] = TINY
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ours = {
            "federation": {
                "rendezvous": f"file://{folder}/rendezvous",
                "listen": "tcp://127.0.0.1:0",
                "key_file": key_file(folder),
                "leave_seconds": 0.0,  # all are stopped at once
            },
            "noloco": {"routing": "off"},
            "model": {"num_layers": 2},
            "gradient_accumulation_steps": 2,
        }
        self.folder = folder
        self.apart = apart
        self.raw = tiny(changes, tiny(ours, base))
        self._running: dict[int, list[Any]] = {}

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        for replica in list(self._running):
            self.kill(replica)

    def start(
        self,
        replica: int,
        ranks: int = 1,
        changes: Mapping[str, Any] | None = None,
        disturb: Callable[[], None] = lambda: None,
    ) -> None:
        """A job.

        Args:
            changes: to its config alone.
            disturb: called in each of its processes, before anything else.
        """
        context = multiprocessing.get_context("fork")
        here = {"training": {"output_dir": str(self.output_dir(replica))}}
        config = write_config(
            self.folder / f"config_of_replica_{replica}", tiny(changes, tiny(here, self.raw))
        )
        launch = (config, replica, ranks, free_port(), self.folder, disturb)
        self._running[replica] = [
            context.Process(target=_run, args=(rank, *launch), daemon=True) for rank in range(ranks)
        ]
        for process in self._running[replica]:
            process.start()

    def kill(self, replica: int) -> None:
        for process in self._running.pop(replica):
            process.kill()
            process.join()

    def signal(self, replica: int, number: signal.Signals) -> None:
        for process in self._running[replica]:
            os.kill(process.pid, number)

    def wait(self) -> None:
        """Wait until all jobs that run have ended with exit code 0."""
        deadline = time.monotonic() + LONGEST_SECONDS
        for replica, processes in list(self._running.items()):
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
                assert process.exitcode is not None, self._what_all_do()
                assert process.exitcode == 0, f"replica {replica}: {process.exitcode}\n{self.log(replica)}"
            del self._running[replica]

    def output_dir(self, replica: int) -> Path:
        return self.folder / f"output_of_replica_{replica}" if self.apart else self.folder

    def log(self, replica: int, rank: int = 0) -> str:
        """Return what a rank of the replica has written, in all its jobs."""
        path = self.folder / log_name(replica, rank)
        return path.read_text() if path.exists() else ""

    def rows(self, replica: int, kind: str = "step") -> list[dict[str, Any]]:
        path = self.output_dir(replica) / f"replica_{replica:02d}" / "metrics.jsonl"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def until(self, replica: int, step: int) -> None:
        """Wait until a replica has written a row about a step as late as this."""
        self._wait_until(lambda: any(row["step"] >= step for row in self.rows(replica)))

    def until_saved(self, replica: int, step: int) -> None:
        """Wait until a replica has written the row of a checkpoint of this step."""
        self._wait_until(lambda: any(row["step"] == step for row in self.rows(replica, "checkpoint")))

    def until_evaluated(self, replica: int) -> None:
        """Wait until a replica has a row of an evaluation: one that continues drops those after its checkpoint."""
        self._wait_until(lambda: bool(self.rows(replica, "evaluation")))

    def until_it_has_a_partner(self, replica: int, after: int) -> None:
        """Wait until a replica has had a round with a partner, later than a step."""
        self._wait_until(
            lambda: any(row["step"] > after and row.get("round/partners") for row in self.rows(replica))
        )

    def until_log(self, replica: int, text: str, rank: int = 0) -> None:
        """Wait until a rank of a replica has written this."""
        self._wait_until(lambda: text in self.log(replica, rank))

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self._what_all_do()
            for other, processes in self._running.items():
                assert all(process.is_alive() for process in processes), self.log(other)
            time.sleep(_LOOK_SECONDS)

    def _what_all_do(self) -> str:
        """Return the end of each log, with where each thread of the jobs is."""
        for replica in self._running:
            self.signal(replica, _WHERE)
        time.sleep(1.0)
        return "\n".join(
            f"--- {path}\n{path.read_text()[-8000:]}" for path in sorted(self.folder.glob("*.log"))
        )

    def state(self, replica: int, step: int) -> dict[str, Tensor]:
        """Every tensor that a replica saved."""
        return state_of(self.folder / f"replica_{replica:02d}" / "checkpoints", replica, step)

    def stop(self) -> None:
        """Ask all jobs that run to end, and wait."""
        for replica in self._running:
            self.signal(replica, signal.SIGTERM)
        self.wait()

    def exit_codes(self, replica: int) -> list[int | None]:
        """Return the exit codes of a job that ends by itself."""
        processes = self._running.pop(replica)
        for process in processes:
            process.join(LONGEST_SECONDS)
        return [process.exitcode for process in processes]

    def missed(self, replica: int) -> int:
        """Return the number of rounds that were skipped although the plan had a partner."""
        return max((row.get("total/missed_rounds", 0) for row in self.rows(replica)), default=0)


def log_name(replica: int, rank: int) -> str:
    return f"replica_{replica}_rank_{rank}.log" if rank else f"replica_{replica}.log"


def state_of(checkpoints: Path, replica: int, step: int) -> dict[str, Tensor]:
    """Every tensor that a replica saved, by file and name."""
    folder = catalog.replica_folder(catalog.step_folder(checkpoints, step), replica)
    return {
        f"{path.name} {name}": tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """To the last bit, but for the bytes of rounds under way: between jobs padding is not sent."""
    assert found.keys() == expected.keys()
    compared = [name for name in found if not name.endswith("delayed_rounds")]
    assert [name for name in compared if not torch.equal(found[name], expected[name])] == []


def _run(
    rank: int, config: str, replica: int, ranks: int, port: int, folder: Path, disturb: Callable[[], None]
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    leaving._LATE_RANK_0_SECONDS = 0.0
    output = os.open(folder / log_name(replica, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    faulthandler.register(_WHERE, sys.stderr, all_threads=True)
    assert not dist.is_initialized()
    disturb()
    leaving.leave(main(["train", "--config", config, "--progress", "lines", "--replica", str(replica)]))
