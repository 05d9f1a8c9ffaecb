"""`watch` shows the other jobs of a federation when the job of its folder has ended."""

import json
from pathlib import Path

import pytest

from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.network import Network
from megatron_noloco.monitor.run_log import RunLog
from megatron_noloco.training import following
from megatron_noloco.training.following import Following, keep_addresses, keep_rows

ROW = {"kind": "step", "step": 20, "replica": 1, "speed/seconds_per_step": 2.5}


def test_rows_of_other_jobs_come_after_the_own_job_has_ended(tmp_path: Path) -> None:
    others, keys = tmp_path / "replica_00" / "others", Keys.make(tmp_path / "key")
    keep_rows(others, [(0, json.dumps({**ROW, "replica": 0})), (1, "no row"), (1, json.dumps(ROW))])
    members = Network(7, {}, keys, listen="127.0.0.1:0").open(1)
    try:
        keep_addresses(others, 7, members.mesh.known(), tmp_path / "key")
        follower = Following(tmp_path)
        found = list[int]()
        for step in (40, 60, 60, 80):
            if step not in found:
                members.publish_row({**ROW, "step": step})
                members.change()
            follower._asked = -following._PAUSE_SECONDS
            assert follower.update()
            found = [
                row["step"] for log in RunLog(tmp_path).replicas for row in log.rows if row["replica"] == 1
            ]
        assert found == [20, 40, 60, 80], "each row once"
    finally:
        members.close()
    follower._asked = -following._PAUSE_SECONDS
    assert not follower.update(), "nobody answers"


def test_the_key_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config may name it as seen from the folder in which the job was started."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    keys = Keys.make(Path("my.key"))
    members = Network(7, {}, listen="127.0.0.1:0", keys=keys).open(1)
    try:
        others = tmp_path / "replica_00" / "others"
        keep_addresses(others, 7, members.mesh.known(), Path("my.key"))
        monkeypatch.chdir(elsewhere)
        assert Following(tmp_path).update()
    finally:
        members.close()
