"""Nothing that runs in programs of users depends on torch's default dtype or device."""

import pytest

from tests.kit.ranks import REPOSITORY, run_python

OUTER = ("exchange", "fragments", "groups", "outer", "outer_state", "payload", "vectors")
FEDERATION = ("final_mean", "gather", "movement", "pairing", "partners", "rounds", "swap", "takeover")
ATTACH = ("attach_shards", "attach_takeover", "inner", "sharded_module")


@pytest.mark.slow  # one to two minutes
def test_outer_federation_and_attach_work_with_other_defaults() -> None:
    names = (*OUTER, *FEDERATION, *ATTACH)
    files = [str(path) for name in names for path in (REPOSITORY / "tests").rglob(f"test_{name}.py")]
    words = ("-m", "pytest", "-q", "-p", "tests.kit.other_defaults", "-m", "not slow", *files)
    found = run_python(*words, timeout=1200)
    assert found.returncode == 0, found.stdout
