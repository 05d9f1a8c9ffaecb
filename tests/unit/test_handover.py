"""Files that a rank hands over to its counterpart in another job, while both do other things."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_noloco.federation.handover import Handover
from megatron_noloco.federation.keys import Keys
from megatron_noloco.transport.chunks import DEFAULT_CHUNK_BYTES
from megatron_noloco.transport.protocol import ExchangeTimeoutError
from tests.unit.federated import SECONDS, swap, transport, until


def nothing() -> None:
    return None


def files(folder: Path) -> list[Path]:
    """One longer than some chunks, one shorter than one."""
    folder.mkdir(exist_ok=True)
    for name, length in (("a", 3 * DEFAULT_CHUNK_BYTES + 5), ("b", 7)):
        content = torch.randint(256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        (folder / name).write_bytes(content.numpy().tobytes())
    return [folder / "a", folder / "b"]


def buffers(paths: list[Path]) -> list[torch.Tensor]:
    return [torch.zeros(path.stat().st_size, dtype=torch.uint8) for path in paths]


@pytest.mark.parametrize("with_keys", [False, True])
def test_files_arrive_as_they_were_offered(tmp_path: Path, with_keys: bool) -> None:
    """Even when their owner removes them after the offer; an exchange of the same ranks goes on meanwhile."""
    keys = Keys.make(tmp_path / "key") if with_keys else None
    paths = files(tmp_path / "given")
    contents, places = [path.read_bytes() for path in paths], buffers(paths)
    with transport(tmp_path, 0, 3, keys=keys) as giver, transport(tmp_path, 1, 3, keys=keys) as taker:
        assert all(one.wait_for(1, SECONDS) for one in (giver, taker))
        Handover(giver, lambda: (b"two files", paths))
        tag, offered = Handover(taker, nothing).offers(SECONDS)
        assert offered == {0: b"two files"}
        for path in paths:
            path.unlink()
        giver.partners.begin(3, 1)
        giver.partners.end(3)
        swap(giver, taker, tag=2 * 10**6)
        Handover(taker, nothing).take(0, tag, places, SECONDS)
    assert [place.numpy().tobytes() for place in places] == contents


def test_who_has_nothing_or_cannot_read_it_says_so_at_once(tmp_path: Path) -> None:
    with (
        transport(tmp_path, 0, 4) as empty,
        transport(tmp_path, 1, 4) as broken,
        transport(tmp_path, 2, 4) as not_ready,
        transport(tmp_path, 3, 4) as taker,
    ):
        assert taker.wait_for(3, SECONDS)
        assert all(one.wait_for(3, SECONDS) for one in (empty, broken, not_ready))
        Handover(empty, nothing)
        Handover(broken, lambda: (b"files", [tmp_path / "not there"]))
        _, offered = Handover(taker, nothing).offers(SECONDS)
        assert offered == {}
        assert all(taker.service.protocol.counterparts[rank].offer is not None for rank in range(3))


def test_what_is_wanted_must_be_as_long_as_what_is_given(tmp_path: Path) -> None:
    paths = files(tmp_path / "given")
    with transport(tmp_path, 0) as giver, transport(tmp_path, 1) as taker:
        assert all(one.wait_for(1, SECONDS) for one in (giver, taker))
        Handover(giver, lambda: (b"two files", paths))
        asking = Handover(taker, nothing)
        tag, _ = asking.offers(SECONDS)
        longer = [torch.zeros(10), torch.zeros(7, dtype=torch.uint8)]
        with pytest.raises(ExchangeTimeoutError):
            asking.take(0, tag, [place.view(torch.uint8) for place in longer], seconds=0.5)
        assert not longer[0].any()


def test_a_second_offer_takes_the_place_of_the_first(tmp_path: Path) -> None:
    paths = files(tmp_path / "given")
    with transport(tmp_path, 0) as giver, transport(tmp_path, 1) as taker:
        assert all(one.wait_for(1, SECONDS) for one in (giver, taker))
        Handover(giver, lambda: (b"two files", paths))
        asking, posted = Handover(taker, nothing), giver.service.protocol.counterparts[1].posted
        for _ in range(5):
            tag, _ = asking.offers(SECONDS)
            assert {name: len(sends) for name, sends in posted.items()} == {tag: 2}
        places = buffers(paths)
        asking.take(0, tag, places, SECONDS)
        assert [place.numpy().tobytes() for place in places] == [path.read_bytes() for path in paths]


def test_what_is_not_taken_is_closed_when_who_asked_trains(tmp_path: Path) -> None:
    paths = files(tmp_path / "given")
    with transport(tmp_path, 0) as giver, transport(tmp_path, 1) as taker:
        assert all(one.wait_for(1, SECONDS) for one in (giver, taker))
        Handover(giver, lambda: (b"two files", paths))
        assert Handover(taker, nothing).offers(SECONDS)[1] == {0: b"two files"}
        assert held_open(paths) == set(paths)
        taker.partners.begin(0, 0)
        until(lambda: not held_open(paths))


def held_open(paths: list[Path]) -> set[Path]:
    """By this process."""
    held = {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    return {path for path in paths if str(path.resolve()) in held}


def test_a_giver_that_goes_ends_the_handover(tmp_path: Path) -> None:
    paths = files(tmp_path / "given")
    with transport(tmp_path, 1) as taker, ThreadPoolExecutor(1) as pool:
        with transport(tmp_path, 0) as giver:
            assert all(one.wait_for(1, SECONDS) for one in (giver, taker))
            Handover(giver, lambda: (b"one file", paths[:1]))
            asking = Handover(taker, nothing)
            tag, _ = asking.offers(SECONDS)
            longer = torch.zeros(9, dtype=torch.uint8)  # never comes
            taking = pool.submit(asking.take, 0, tag, [longer], SECONDS)
            until(lambda: giver.service.protocol.counterparts[1].posted.keys() == set())
        with pytest.raises(ConnectionError, match="rank 0 has gone"):
            taking.result()
