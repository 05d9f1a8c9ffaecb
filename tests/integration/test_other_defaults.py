"""Nothing that runs in programs of users depends on torch's default dtype or device."""

import subprocess
import sys

import pytest

from tests.harness import REPOSITORY

OUTER = ("exchange", "fragments", "groups", "outer", "outer_state", "payload", "vectors")
FEDERATION = ("final_mean", "gather", "movement", "pairing", "partners", "rounds", "swap", "takeover")
ATTACH = ("attach_shards", "attach_takeover", "inner", "sharded_module")


@pytest.mark.slow  # one to two minutes
def test_outer_federation_and_attach_work_with_other_defaults() -> None:
    files = [f"tests/unit/test_{name}.py" for name in (*OUTER, *FEDERATION, *ATTACH)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.other_defaults", "-m", "not slow", *files]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1200)
    assert found.returncode == 0, found.stdout
