"""Texts from other machines: none reaches a terminal, a log or a file but as a short line of ASCII."""

import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_noloco.federation.control import LONGEST_FIRST, Address, RefusedError, State, packed, unpacked
from rich.console import Console

from megatron_noloco.files import outside
from megatron_noloco.monitor.run_log import RunLog
from megatron_noloco.monitor.watch import run_table
from megatron_noloco.training.outputs import OtherJobs
from tests.unit.test_reading import step
from tests.unit.test_session import GREETING, Between, Hand, Replica

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


def said_by(hand: Hand, data: bytes) -> list[str]:
    with redirect_stderr(io.StringIO()) as output:
        hand.write(data)
    return output.getvalue().split("\n")[:-1]


@pytest.mark.parametrize("fills", [1, 1000])
def test_a_stranger_writes_no_line_of_its_own(fills: int) -> None:
    """Into the message of pydantic, which quotes it."""
    text = json.dumps({"kind": BAD * fills}).encode()
    with pytest.raises(RefusedError) as refused:
        unpacked(text, State)
    assert is_harmless(str(refused.value))
    hand = Hand(Replica())
    hand.write(GREETING)
    (line,) = said_by(hand, len(text).to_bytes(4, "big") + text)
    assert is_harmless(line)
    assert "a connection to this replica failed: a message is none: " in line
    assert "[2J" in line, "cut and escaped, it is said"


def test_the_first_message_is_short() -> None:
    hand = Hand(Replica())
    hand.write(GREETING)
    (line,) = said_by(hand, (LONGEST_FIRST + 1).to_bytes(4, "big"))
    assert line.endswith(f"a message has more than {LONGEST_FIRST} bytes")
    assert not hand.open


def test_a_replica_that_knows_thousands_of_others_begins_with_a_short_message() -> None:
    """Whoever it connects to learns them with the session."""
    slots = 4096
    first, second = Replica(0, slots=slots), Replica(2, slots=slots)
    second.peers.directory.merge({slot: Address("", 5) for slot in range(3, slots)})
    assert len(packed(second.peers._hello())) < 2000 < LONGEST_FIRST
    between = Between(first, second)
    second.tick()
    between.deliver()
    assert between.output.getvalue() == ""
    assert len(first.peers.directory.addresses) == slots - 1


class Tells:
    """Stands for a transport over which another job has told rows."""

    def __init__(self, *rows: Any) -> None:
        self._rows = rows

    def tell_row(self, row: Any) -> None: ...

    def rows(self) -> Any:
        return ((3, json.dumps(row)) for row in self._rows)


def test_a_row_of_another_job_is_shown_as_text(tmp_path: Path) -> None:
    own = tmp_path / "replica_00"
    own.mkdir()
    (own / "metrics.jsonl").write_text(json.dumps(step(4)) + "\n")
    row = step(4) | {"round/index": f"[/x]{BAD}", "round/partners": [BAD], "round/missed": BAD, BAD: BAD}
    OtherJobs(Tells(row), own).write(step(5))
    (written,) = (own / "others" / "replica_03" / "metrics.jsonl").read_text().splitlines()
    assert outside(json.loads(written)) == json.loads(written)
    log, output = RunLog(tmp_path), io.StringIO()
    Console(file=output, width=300).print(run_table(log, log.replicas[0].written))
    assert all(character.isprintable() for character in output.getvalue().replace("\n", ""))
    assert "[/x]" in output.getvalue(), "rich takes it for no markup"
