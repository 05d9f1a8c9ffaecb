"""From an invitation to a common model, on hosts that share no network but slow links."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.federation.keys import Keys
from megatron_noloco.monitor.run_log import RunLog
from megatron_noloco.preflight.invitation import invitation_in
from tests.harness import launch_environ, network_lab
from tests.integration.tiny import tiny, write_config, write_text
from tests.netlab.lab import Lab
from tests.netlab.network import Link
from tests.netlab.relay import address_of

STEPS, SECONDS = 2000, 600.0


class Host:
    """A machine with a folder that was empty."""

    def __init__(self, there: Lab, name: str, folder: Path) -> None:
        self._there, self.name, self.folder = there, name, folder
        folder.mkdir()

    @contextmanager
    def runs(self, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command of the program, with its output in the folder."""
        if command[0] == "join":
            command += ("--folder", str(self.folder / "joined"))
        program = self._there.on(self.name, sys.executable, "-m", "megatron_noloco", *command)
        environ = launch_environ({"GLOO_SOCKET_IFNAME": "lo"})
        with (self.folder / f"{command[0]}.log").open("wb") as log:
            process = subprocess.Popen(program, stdout=log, stderr=log, cwd=self.folder, env=environ)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def log(self, command: str) -> str:
        path = self.folder / f"{command}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, pattern: str, command: str) -> str:
        """Wait until a command has written something; return it."""
        deadline = time.monotonic() + SECONDS
        while (found := re.search(pattern, self.log(command))) is None:
            assert time.monotonic() < deadline, self.log(command)[-3000:]
            time.sleep(0.1)
        return found[0]


def config_of(folder: Path, address: str) -> dict[str, Any]:
    Keys.make(folder / "key")
    changes = {
        "noloco": {"local_steps": 10, "routing": "off", "final_average": True},
        "parallel": None,
        "federation": {
            "rendezvous": f"tcp://{address}:29600",
            "key_file": str(folder / "key"),
            "leave_seconds": 120.0,
        },
        "training": {"train_iters": STEPS, "log_interval": 5, "output_dir": str(folder / "run")},
        "data": {"text": write_text(folder)},
        "checkpoint": {"save_interval": 300},
        "evaluation": {"iters": 2, "interval": STEPS},
    }
    return tiny(changes)


def last_evaluation(run: Path, replica: int) -> dict[str, Any]:
    (log,) = (log for log in RunLog(run).replicas if int(log.replica) == replica)
    return dict(log.rows_of("evaluation")[-1])


@pytest.mark.slow
def test_three_commands_lead_to_one_model(tmp_path: Path) -> None:
    """The fourth has two ranks, and comes in the middle; the second leaves with a notice; the third is killed."""
    with ExitStack() as stack:
        there = stack.enter_context(network_lab([Link(rate=100e6, delay=0.005)] * 4))
        hosts = [Host(there, name, tmp_path / name) for name in there.names]
        first, leaves, dies, late = hosts
        # An absolute path: nsenter changes the working directory.
        config = write_config(first.folder, config_of(first.folder, address_of(0)))
        text = f"text={first.folder / 'text.txt'}"

        stack.enter_context(first.runs("train", config, "--replica", "0"))
        first.until(r"iteration +\d", "train")
        secrets, join = list[str](), dict[str, list[str]]()
        for host in (leaves, dies, late):
            file = str(host.folder / "invitation.noloco")
            options = ("invite", config, "--file", file)
            command = there.on(first.name, sys.executable, "-m", "megatron_noloco", *options)
            subprocess.run(command, cwd=first.folder, capture_output=True, text=True, check=True)
            secrets.append(invitation_in(Path(file).read_text()).member_file.splitlines()[1])
            join[host.name] = ["join", file, "--data", text]

        leaving = stack.enter_context(leaves.runs(*join[leaves.name]))
        dying = stack.enter_context(dies.runs(*join[dies.name]))
        for host in (leaves, dies):
            host.until(r"recovered from replica", "join")
        with late.runs(*join[late.name], "--no-start") as joining:
            assert joining.wait(SECONDS) == 0, late.log("join")
        path = late.folder / "joined" / "config.json"
        own = json.loads(path.read_text()) | {"parallel": {"pipeline_model_parallel_size": 2}}
        path.write_text(json.dumps(own))
        slot = late.until(r"config of replica \d", "join")[-1]
        last = stack.enter_context(late.runs("train", str(path)))
        late.until(r"recovered from replica", "train")

        leaving.send_signal(signal.SIGTERM)
        assert leaving.wait(SECONDS) == 0
        assert re.search(
            r"replicas \d and \d exchanged once more|stopped after iteration \d+0 ", leaves.log("join")
        )
        dying.kill()
        assert last.wait(SECONDS) == 0, late.log("train")[-3000:]
        first.until(r"rounds had a partner", "train")
        # Not their last round, but the mean of these two makes them alike.
        assert f"final average of replicas 0, {slot} " in first.log("train")
        ends = [
            last_evaluation(first.folder / "run", 0),
            last_evaluation(late.folder / "joined" / "run", int(slot)),
        ]
        assert [row["step"] for row in ends] == [STEPS, STEPS]
        assert ends[0]["validation/loss"] == pytest.approx(ends[1]["validation/loss"], rel=1e-5)
        for path in tmp_path.rglob("*.log"):
            assert not any(secret in path.read_text(errors="replace") for secret in secrets), path
