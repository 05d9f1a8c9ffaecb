"""Examples for other trainers, whose packages are optional: two jobs, of which one is killed and comes back."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.ranks import REPOSITORY, key_file, launch_environ

pytestmark = pytest.mark.slow
SECONDS = 400.0


class Job:
    """A process that runs an example; what it prints goes to a file."""

    def __init__(self, example: str, slot: int, slots: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        key_file(folder.parent, f"{folder.name}.key")
        self._log = folder / f"slot_{slot}_of_{slots}.log"
        command = [sys.executable, "-u", REPOSITORY / "examples" / f"{example}.py"]
        command += ["--slot", str(slot), "--slots", str(slots), "--folder", str(folder)]
        environ = launch_environ({"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"})
        with self._log.open("a") as out:
            self.process = subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT)

    def said(self) -> str:
        return self._log.read_text()

    def wait_until(self, come: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not come(self.said()):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def end(self) -> float:
        """Return the loss on held-out text."""
        assert self.process.wait(SECONDS) == 0, self.said()
        return float(re.findall(r"loss on held-out text (\S+)", self.said())[-1])


def partners(text: str) -> list[int]:
    """Return the partner of each round; -1: the round was skipped."""
    return [int(partner) for partner in re.findall(r"partner'?:? (-?\d+)", text)]


@pytest.mark.parametrize(
    ("package", "example", "model"),
    [
        ("trl", "trl_sft", "final/adapter_model.safetensors"),
        ("pytorch_lightning", "lightning_callback", "final.pt"),
        ("torchtitan", "torchtitan_loop", "final.pt"),
    ],
)
def test_two_jobs_with_a_kill_end_as_one_model(
    tmp_path: Path, package: str, example: str, model: str
) -> None:
    """And the model is as good as that of a job which trains alone, or better."""
    pytest.importorskip(package)
    alone = Job(example, 0, 1, tmp_path / "alone").end()
    jobs = [Job(example, slot, 2, tmp_path / "two") for slot in (0, 1)]
    jobs[1].wait_until(lambda text: len(partners(text)) >= 4)
    jobs[1].process.kill()
    jobs[1].process.wait()
    jobs[0].wait_until(lambda text: -1 in partners(text))
    jobs[0].process.send_signal(signal.SIGSTOP)  # else it may end before the other has imported its packages
    try:
        jobs[1] = Job(example, 1, 2, tmp_path / "two")
        jobs[1].wait_until(lambda text: text.count("begins; checkpoint: ") == 2)
    finally:
        jobs[0].process.send_signal(signal.SIGCONT)
    losses = [job.end() for job in jobs]
    models = [(tmp_path / "two" / f"replica_{slot}" / model).read_bytes() for slot in (0, 1)]
    assert models[0] == models[1]
    assert losses[0] == losses[1] < 1.05 * alone
