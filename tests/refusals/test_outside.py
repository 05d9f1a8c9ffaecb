"""Texts from other machines: none reaches a terminal, a log or a file but as a short line of ASCII."""

import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_noloco.files import outside
from megatron_noloco.monitor.run_log import RunLog
from megatron_noloco.monitor.watch import run_table
from megatron_noloco.monitor.writers import OTHERS
from megatron_noloco.training.following import keep_rows
from tests.kit.memory_mesh import World
from tests.kit.rows import step
from tests.kit.worlds import members_of, pause, replica_of, run_all, take_part, vectors

BAD = "\x1b[2J\x1b]0;title\x07\r\nready\u202e\x9b31m [red]"


def is_harmless(line: str) -> bool:
    return len(line) <= 600 and line.isascii() and line.isprintable()


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_each_text_becomes_a_short_line(value: Any) -> None:
    found = outside(value)
    assert isinstance(found, type(value))
    assert outside(found) == found
    assert is_harmless(outside(json.dumps(found)))
    if isinstance(value, str):
        assert is_harmless(found)
        assert (found == value) == (is_harmless(value) and len(value) <= 500)


@pytest.mark.parametrize("times", [1, 1000])
def test_a_partner_writes_no_line_of_its_own(times: int) -> None:
    """Neither by its word on a round nor by what its status says."""
    world, output = World(), io.StringIO()
    partner, own = members_of(world, 0), members_of(world, 1, digests={"model": "1", "data": "1"})
    word = (BAD * times).encode()

    def lies() -> None:
        partner.begin_round(0, 1)
        partner.mesh.offer("round/0/verdict", word, own.mesh.me)
        pause(partner.mesh, 20.0)
        partner.change(digests={"model": "2", BAD: "1"}, kind="")
        pause(partner.mesh, 1.0)

    def takes_part() -> str:
        missed = take_part(replica_of(own), vectors()[1], 0).report.missed
        pause(own.mesh, 30.0)
        assert own.present() == {}
        return missed

    with redirect_stderr(output):
        _, missed = run_all(world, [(partner, lies), (own, takes_part)])
    assert is_harmless(missed)
    assert "[2J" in missed, "cut and escaped, it is said"
    lines = output.getvalue().splitlines()
    assert any("differs from replica 1 in model" in line for line in lines)
    assert all(map(is_harmless, lines))


def test_a_row_of_another_job_is_shown_as_text(tmp_path: Path) -> None:
    own = tmp_path / "replica_00"
    own.mkdir()
    (own / "metrics.jsonl").write_text(json.dumps(step(4)) + "\n")
    row = step(4) | {"round/partners": [], "round/missed": f"[/x]{BAD}", "kind": "step", BAD: BAD}
    numbers = {"train/loss": BAD, "round/partners": [BAD], "speed/mfu": [BAD], "round/deadline_seconds": BAD}
    others = [row | {name: value} for name, value in numbers.items()]
    keep_rows(own / OTHERS, [(3, json.dumps(one)) for one in (row, *others)])
    (written,) = (own / "others" / "replica_03" / "metrics.jsonl").read_text().splitlines()
    assert outside(json.loads(written)) == json.loads(written)
    log, output = RunLog(tmp_path), io.StringIO()
    Console(file=output, width=300).print(run_table(log, log.replicas[0].written))
    assert all(character.isprintable() for character in output.getvalue().replace("\n", ""))
    assert "[/x]" in output.getvalue(), "rich takes it for no markup"
