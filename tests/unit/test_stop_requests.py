"""How a job learns that it is to stop, or to leave its federation."""

from pathlib import Path

import pytest

from megatron_noloco.job import notice
from megatron_noloco.job.notice import notice_of
from megatron_noloco.job.run_folder import ask_to_stop, asks_to_leave, stop_request
from tests.unit.federated import until


@pytest.mark.parametrize("leave", [False, True])
def test_a_request_says_whether_it_is_one_to_leave(tmp_path: Path, leave: bool) -> None:
    ask_to_stop(tmp_path, leave)
    assert asks_to_leave(stop_request(tmp_path)) == leave
    assert not asks_to_leave("")


def test_a_command_that_ends_with_0_is_the_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run again and again, also where it takes too long, and never waited for."""
    monkeypatch.setattr(notice, "_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(notice, "_LONGEST_SECONDS", 0.2)
    ran, flag = tmp_path / "ran", tmp_path / "flag"
    asked = notice_of(f"echo >> {ran}; test -e {flag} || exec sleep 600")

    def has_run_twice() -> bool:
        assert not asked()
        return ran.exists() and len(ran.read_text()) >= 2

    until(has_run_twice)
    flag.touch()
    until(asked)
    assert not notice_of(None)()
