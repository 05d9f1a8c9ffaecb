"""Jobs that share nothing but a folder train one model; each has a network of its own, without a route."""

import ctypes
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kit.federation import Federation, assert_same
from tests.kit.tiny import tiny, write_text
from tools.faults.replica import pause

pytestmark = pytest.mark.slow

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of unshare(2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def permitted() -> None:
    """Skip where no network namespace can be made."""
    if subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("needs the right to make network namespaces, unshare(1) and ip(8)")


def alone(seconds: float = 0.0) -> None:
    """Take this process into a network of its own, which has a loopback interface and no other; then be slow."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if seconds:
        pause(seconds)


def changes(text: str, **more: Any) -> dict[str, Any]:
    base = {
        "data": {"text": text},
        "federation": {"listen": "off"},
        "noloco": {"final_average": True},
    }
    return tiny(more, base)


def assert_one_model(federation: Federation, replicas: list[int], step: int) -> None:
    first, *others = (federation.state(replica, step) for replica in replicas)
    slow = {name: tensor for name, tensor in first.items() if "slow" in name}
    assert slow
    for other in others:
        assert_same({name: tensor for name, tensor in other.items() if "slow" in name}, slow)


def had_partners(federation: Federation, replica: int) -> int:
    return sum(bool(row.get("round/partners")) for row in federation.rows(replica))


def test_jobs_without_a_route_are_killed_come_back_and_join(tmp_path: Path, text: str) -> None:
    """tests/runs/test_first_run.py has two such jobs, on hosts that share nothing else."""
    steps = {"training": {"train_iters": 60}, "checkpoint": {"save_interval": 4}}
    with Federation(tmp_path, changes(text, federation={"start_with": 2}, **steps)) as federation:
        for replica in range(2):
            federation.start(replica, disturb=partial(alone, 0.1))
        federation.until_it_has_a_partner(1, after=4)
        federation.kill(1)
        before = max(row["step"] for row in federation.rows(1))
        for replica in (1, 2):
            federation.start(replica, disturb=partial(alone, 0.1))
            federation.until_it_has_a_partner(replica, after=before)
        federation.wait()
        assert "recovered from replica " in federation.log(2)
        assert_one_model(federation, [0, 1, 2], 60)
    assert not [path for path in (tmp_path / "rendezvous").rglob("*") if path.is_file()], "nothing is left"


def test_a_job_between_two_networks_is_in_the_mean_with_both(tmp_path: Path, text: str) -> None:
    """Replica 1 reaches 0 by TCP, and 2 through the folder; 0 and 2 have no way to each other."""
    steps = {"training": {"train_iters": 20}, "checkpoint": {"save_interval": 20}}
    with Federation(tmp_path, changes(text, federation={"start_with": 2}, **steps)) as federation:
        federation.start(0, changes={"federation": {"listen": "tcp://127.0.0.1:0"}})
        federation.start(1)
        federation.start(2, disturb=alone)
        federation.wait()
        assert had_partners(federation, 1)
        assert_one_model(federation, [0, 1, 2], 20)
