"""Statuses and pieces between members, whatever carries them: HTTPS, a folder, a bucket."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from megatron_noloco.federation import folder_members, https_links
from megatron_noloco.federation.folder_carrier import FolderCarrier
from megatron_noloco.federation.https_carrier import HttpsCarrier
from megatron_noloco.federation.mesh import (
    MOST_NAME_CHARACTERS,
    Blob,
    Carrier,
    Fetch,
    LostError,
    Member,
    Mesh,
    Patience,
    RefusedError,
    StalledError,
)
from megatron_noloco.federation.statuses import PeerStatus, Statuses
from megatron_noloco.federation.store import Store
from tests.kit.buckets import FakeBucket, bucket
from tests.kit.ranks import federation_keys, until

RUN, SECONDS = 7, 60.0
Join = Callable[..., Mesh]


@pytest.fixture(params=["HTTPS", "folder", "bucket"])
def join(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Join]:
    """Adds a member to those that meet; they leave with the test."""
    meshes, seeds, files = list[Mesh](), list[str](), FakeBucket()
    folder = tmp_path_factory.mktemp("run")

    def carrier() -> tuple[Carrier, str]:
        if request.param == "HTTPS":
            listener = socket.create_server(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            return HttpsCarrier({}, listener, seeds), address
        return FolderCarrier(
            Store.of(folder.as_uri()) if request.param == "folder" else bucket(files), {}
        ), ""

    def add(slot: int, incarnation: int = 0) -> Mesh:
        me = Member(slot, incarnation or time.time_ns())
        own, address = carrier()
        mesh = Mesh(Statuses(RUN, me, federation_keys().identity(slot)), [own], print)
        publish(mesh, addresses=[address] if address else [])
        seeds.extend([address] * (not seeds and bool(address)))
        meshes.append(mesh)
        return mesh

    yield add
    for mesh in meshes:
        mesh.close()
    assert [mesh.carriers[0].failure for mesh in meshes] == [None] * len(meshes)


def publish(mesh: Mesh, **changes: object) -> None:
    own = mesh.statuses.own
    known = {"addresses": own.status.addresses} if own is not None else {}
    mesh.publish(PeerStatus(**known | changes))  # type: ignore[arg-type]


def meet(*meshes: Mesh) -> None:
    until(lambda: all(a is b or a.reaches(b.me) for a in meshes for b in meshes))


def result(mesh: Mesh, fetch: Fetch) -> Blob:
    return mesh.result(fetch, Patience(mesh, fetch.giver, seconds=SECONDS))


def test_pieces_of_all_kinds_pass_both_ways(join: Join) -> None:
    one, other = join(0), join(1)
    meet(one, other)
    contents = {f"piece/{number}": os.urandom(2**19) for number in range(12)}
    contents |= {
        "Odd näme?#%/": b"odd",
        "n" * MOST_NAME_CHARACTERS: b"long",
        "none": b"",
        "x": os.urandom(2**22 + 1),
    }
    ways = [(one, other), (other, one)]
    asked = [(taker, taker.begin(giver.me, name), name) for giver, taker in ways for name in contents]
    for giver, taker in ways:
        for name, content in contents.items():
            giver.offer(name, content, to=taker.me)
    for taker, fetch, name in asked:
        assert result(taker, fetch) == contents[name]
    assert one.moved.keys() == {1}
    assert other.moved.keys() == {0}


def test_a_fetch_waits_may_be_repeated_and_is_refused(join: Join) -> None:
    giver, taker = join(0), join(1)
    meet(giver, taker)
    asked = taker.begin(giver.me, "later")
    assert taker.begin(giver.me, "later") is asked
    until(lambda: giver.offers.takers("later") == [(taker.me, "later")])
    assert asked.outcome is None
    giver.offer("later", b"content")
    assert result(taker, asked) == b"content"
    assert taker.fetch(giver.me, "later", SECONDS) == b"content", "it may be repeated"
    asked = taker.begin(giver.me, "old/1")
    until(lambda: giver.offers.takers("old/"))
    giver.offers.withdraw("old/")
    for fetch in (asked, taker.begin(giver.me, "old/2")):
        with pytest.raises(RefusedError, match="was withdrawn"):
            result(taker, fetch)
    giver.offer("anothers", b"", to=Member(9, 9))
    with pytest.raises(RefusedError, match="is another member's"):
        taker.fetch(giver.me, "anothers", SECONDS)


def test_more_pieces_are_asked_for_than_a_taker_may_await(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("mesh", "https_transfers"):
        monkeypatch.setattr(f"megatron_noloco.federation.{module}.MOST_WISHES", 4)
    giver, taker = join(0), join(1)
    meet(giver, taker)
    asked = [taker.begin(giver.me, f"later/{number}") for number in range(10)]
    until(lambda: len(giver.offers.takers("later/")) == 4)
    for number in range(10):
        giver.offer(f"later/{number}", bytes([number]))
    assert [result(taker, fetch) for fetch in asked] == [bytes([number]) for number in range(10)]


def test_statuses_follow_and_leaving_is_seen(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the lease."""
    monkeypatch.setattr(https_links, "LEASE_SECONDS", 1000.0)
    monkeypatch.setattr(folder_members, "_LEASE_SECONDS", (1000.0, 1000.0))
    one, leaves, third = join(0), join(1), join(2)
    meet(one, leaves, third)
    for number in range(1, 20):
        publish(leaves, step=number)
    until(lambda: one.members()[leaves.me].step == third.members()[leaves.me].step == 19)
    asked = one.begin(leaves.me, "never")
    publish(leaves, phase="left", step=19)
    leaves.close()
    until(lambda: one.members().keys() == third.members().keys() == {one.me, third.me})
    left = one.known()[leaves.me]
    assert (left.phase, left.step) == ("left", 19)
    for fetch in (asked, one.begin(leaves.me, "x")):
        with pytest.raises(StalledError):
            result(one, fetch)


def test_a_later_process_of_a_slot_takes_its_place(join: Join) -> None:
    one, earlier = join(0), join(1)
    meet(one, earlier)
    later = join(1)
    until(lambda: one.members().keys() == {one.me, later.me})
    until(lambda: earlier.is_followed(earlier.me))
    assert earlier.me not in later.members()
    later.offer("piece", b"content")
    assert one.fetch(later.me, "piece", SECONDS) == b"content"
    with pytest.raises(StalledError):
        one.fetch(earlier.me, "piece", SECONDS)


def test_nobody_reads_memory_of_a_withdrawn_piece(join: Join) -> None:
    one, other = join(0), join(1)
    meet(one, other)
    for number in range(4):
        content = bytearray(os.urandom(2**25))
        original = bytes(content)
        giver, taker = (one, other) if number % 2 else (other, one)
        fetch = taker.begin(giver.me, f"large/{number}", is_large=True)
        giver.offer(f"large/{number}", content, to=taker.me)
        until(lambda giver=giver, taker=taker: taker.moved or giver.moved)  # type: ignore[misc]
        giver.offers.withdraw(f"large/{number}")
        content[:] = bytes(len(content))
        with suppress(LostError):
            assert result(taker, fetch) == original
        taker.cancel(fetch)
        taker.moved.clear()
        giver.moved.clear()
