"""How a job learns that it is to stop, or to leave its federation."""

from pathlib import Path

import pytest

from megatron_noloco.job.run_folder import ask_to_stop, asks_to_leave, stop_request


@pytest.mark.parametrize("leave", [False, True])
def test_a_request_says_whether_it_is_one_to_leave(tmp_path: Path, leave: bool) -> None:
    ask_to_stop(tmp_path, leave)
    assert asks_to_leave(stop_request(tmp_path)) == leave
    assert not asks_to_leave("")
