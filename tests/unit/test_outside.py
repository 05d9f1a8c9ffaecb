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

from megatron_noloco.federation.messages import LONGEST_FIRST_BYTES, Address
from megatron_noloco.federation.streams import StreamEndedError
from megatron_noloco.files import outside
from megatron_noloco.monitor.run_log import RunLog
from megatron_noloco.monitor.watch import run_table
from megatron_noloco.training.separate_jobs import OtherJobs
from tests.unit.memory_streams import MemoryCarrier
from tests.unit.nodes import Nodes, address_of, run, until
from tests.unit.test_reading import step

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


def lines_about(said: bytes) -> list[str]:
    """Say something to a replica in place of a first message; return its lines, and why it ends the stream."""

    async def main() -> str:
        async with Nodes() as nodes:
            await nodes.add(0)
            stream = await MemoryCarrier(nodes.places, "stranger").dial(address_of(0)[0].endpoint)
            await stream.send(said)
            with pytest.raises(StreamEndedError) as ended:
                await stream.receive(1)
            return str(ended.value)

    with redirect_stderr(io.StringIO()) as output:
        reason = run(main())
    return [*output.getvalue().splitlines(), reason]


@pytest.mark.parametrize("fills", [1, 1000])
def test_a_stranger_writes_no_line_of_its_own(fills: int) -> None:
    """Into the message of pydantic, which quotes it."""
    text = json.dumps({"type": BAD * fills}).encode()
    lines = lines_about(len(text).to_bytes(4) + text)
    assert all(map(is_harmless, lines))
    assert "[2J" in lines[-1], "cut and escaped, it is said"


def test_the_first_message_is_short() -> None:
    lines = lines_about((LONGEST_FIRST_BYTES + 1).to_bytes(4))
    assert lines == [f"a message has more than {LONGEST_FIRST_BYTES} bytes"]


async def test_replica_tells_thousands_of_addresses() -> None:
    async with Nodes() as nodes:
        first = await nodes.add(0)
        await nodes.add(1, address_of(0) | {slot: Address("", 5) for slot in range(2, 4096)})
        await until(lambda: len(first.directory.addresses) == 4096)


class Tells:
    """Stands for the thread of a leader, which another job has told rows."""

    def __init__(self, *rows: Any) -> None:
        self._rows = rows

    def tell_row(self, text: str) -> None: ...

    def rows(self) -> Any:
        return ((3, json.dumps(row)) for row in self._rows)


def test_a_row_of_another_job_is_shown_as_text(tmp_path: Path) -> None:
    own = tmp_path / "replica_00"
    own.mkdir()
    (own / "metrics.jsonl").write_text(json.dumps(step(4)) + "\n")
    row = step(4) | {"round/index": f"[/x]{BAD}", "round/partners": [BAD], "round/missed": BAD, BAD: BAD}
    row |= {"train/loss": BAD, "train/skipped_steps": BAD, "speed/mfu": [BAD], "round/deadline_seconds": BAD}
    OtherJobs(Tells(row), own).write(step(5))
    (written,) = (own / "others" / "replica_03" / "metrics.jsonl").read_text().splitlines()
    assert outside(json.loads(written)) == json.loads(written)
    log, output = RunLog(tmp_path), io.StringIO()
    Console(file=output, width=300).print(run_table(log, log.replicas[0].written))
    assert all(character.isprintable() for character in output.getvalue().replace("\n", ""))
    assert "[/x]" in output.getvalue(), "rich takes it for no markup"
