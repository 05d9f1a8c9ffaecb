"""The user is told who comes, leaves and is lost."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_noloco.federation.dialling import Carriers
from megatron_noloco.federation.folder import FolderCarrier
from megatron_noloco.federation.keys import Checksum
from megatron_noloco.federation.links import PeerStatus
from megatron_noloco.federation.messages import Address, Status
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.node_thread import Attendance
from megatron_noloco.federation.store import Store
from tests.unit.memory_streams import MemoryCarrier
from tests.unit.nodes import MEMBER, Nodes, address_of, until

_STATES = {  # present, has left, is silent
    "there": (True, False, False),
    "just lost": (False, False, False),
    "silent": (False, False, True),
    "left": (False, True, False),
}
_LINE = re.compile(
    r"replicas? (.*) (has come|have come|(?:is|are) back|ha\w+ left|\w+ not heard.*) \((\d+) .*"
)


def _link(state: str) -> Any:
    present, has_left, is_silent = _STATES[state]
    status = Status("left" if has_left else "training")
    return SimpleNamespace(seen=PeerStatus(1, present, status), is_silent=is_silent)


@given(st.lists(st.dictionaries(st.integers(1, 8), st.sampled_from([*_STATES]))))
def test_lines_say_who_is_there_and_each_change_once(seconds: list[dict[int, str]]) -> None:
    attendance, links = Attendance(), dict[int, Any]()
    there, told = set[int](), set[int]()
    for changes in seconds:
        links |= {slot: _link(state) for slot, state in changes.items()}
        there |= {slot for slot, state in changes.items() if state == "there"}
        there -= {slot for slot, state in changes.items() if state in ("silent", "left")}
        for line in attendance.changes(links):
            found = _LINE.fullmatch(line)
            assert found is not None, line
            slots = set(map(int, found[1].split(", ")))
            comes = "come" in found[2] or "back" in found[2]
            assert slots.isdisjoint(told) if comes else slots <= told
            told ^= slots
            assert int(found[3]) == 1 + len(there)
        assert told == there
        assert [*attendance.changes(links)] == []


def test_many_at_once_are_one_line() -> None:
    links: Any = {slot: _link("there") for slot in range(1, 201)}
    (line,) = Attendance().changes(links)
    assert line == "replicas 1, 2, 3, 4, 5, 6, 7, 8 and 192 more have come (201 replicas)"


async def test_a_lost_link_is_named_unless_it_comes_back() -> None:
    attendance = Attendance()
    async with Nodes() as nodes:
        one, other = await nodes.add(0), await nodes.add(1, address_of(0))
        await until(one.present)
        assert [*attendance.changes(one.links)] == ["replica 1 has come (2 replicas)"]
        one.links[1].end("lost")
        assert not one.present()
        assert [*attendance.changes(one.links)] == []
        await until(one.present)
        assert [*attendance.changes(one.links)] == []
        await other.links[0]._sending.acquire()  # it says nothing from now on
        lines = list[str]()
        await until(lambda: lines.extend(attendance.changes(one.links)) or lines)
        assert lines == ["replica 1 is not heard any more (1 replica)"]


@pytest.mark.parametrize("leaves", [0, 1])
async def test_leaving_is_heard_over_a_folder(leaves: int, tmp_path: Path) -> None:
    """Where bytes under way are lost with the stream."""
    attendance, places = Attendance(), Nodes()
    for slot in range(2):
        carrier = FolderCarrier(Store.of(tmp_path.as_uri()), slot, Checksum(), print)
        carriers = Carriers(MemoryCarrier(places.places, f"tcp://memory:{1 + slot}"), carrier)
        places.nodes.append(Node(slot, Address(carrier.endpoint, 1), MEMBER, carriers))
    async with places:
        for node in places.nodes:
            node.directory.merge({other.slot: other.directory.own for other in places.nodes})
            await node.start()
        leaving, stays = places.nodes.pop(leaves), places.nodes[0]
        await until(stays.present)
        assert [*attendance.changes(stays.links)] == [f"replica {leaves} has come (2 replicas)"]
        await leaving.close()
        assert [*attendance.changes(stays.links)] == [f"replica {leaves} has left (1 replica)"]
