"""How a job learns that it is to stop, or to leave its federation."""

import time
from pathlib import Path

import pytest

from megatron_noloco.job import stopping
from megatron_noloco.job.run_folder import ask_to_stop, asks_to_leave, stop_request
from megatron_noloco.job.stopping import notice_of


@pytest.mark.parametrize("leave", [False, True])
def test_a_request_says_whether_it_is_one_to_leave(tmp_path: Path, leave: bool) -> None:
    ask_to_stop(tmp_path, leave)
    assert asks_to_leave(stop_request(tmp_path)) == leave
    assert not asks_to_leave("")


def test_a_command_that_ends_with_0_is_the_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run again and again, also where it takes too long, and never waited for. No child of it lives on."""
    monkeypatch.setattr(stopping, "_NOTICE_SECONDS", 0.01)
    monkeypatch.setattr(stopping, "_LONGEST_NOTICE_SECONDS", 0.2)
    ran, flag = tmp_path / "ran", tmp_path / "flag"
    alone = f"exec 9> {tmp_path / 'lock'}; flock -n 9"  # which a child that lives holds
    asked = notice_of(f"{alone} && echo >> {ran} && {{ test -e {flag} || sleep 600 | cat; }}")
    deadline = time.monotonic() + 20
    while not ran.exists() or len(ran.read_text()) < 2:
        assert not asked()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    flag.touch()
    while not asked():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not notice_of(None)()
