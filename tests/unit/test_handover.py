"""Files that a rank hands over to its counterpart in another job, while both do other things."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_noloco.federation.handover import Handover
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.transport.chunks import DEFAULT_CHUNK_BYTES
from megatron_noloco.transport.protocol import ExchangeTimeoutError
from tests.unit.federated import SECONDS, connected, swap, transport, until


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Two files, of more than some chunks and of less than one."""
    found = [tmp_path / "a", tmp_path / "b"]
    for path, length in zip(found, (3 * DEFAULT_CHUNK_BYTES + 5, 7), strict=True):
        content = torch.randint(256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        path.write_bytes(content.numpy().tobytes())
    return found


def gives(transport: FederationTransport, *paths: Path) -> Handover:
    """A handover that offers these files, or nothing."""
    return Handover(transport, lambda: (b"files", paths) if paths else None)


def buffers(paths: list[Path]) -> list[torch.Tensor]:
    return [torch.zeros(path.stat().st_size, dtype=torch.uint8) for path in paths]


def contents(buffers: list[torch.Tensor]) -> list[bytes]:
    return [buffer.numpy().tobytes() for buffer in buffers]


@pytest.mark.parametrize("with_keys", [False, True])
def test_files_arrive_as_they_were_offered(tmp_path: Path, paths: list[Path], with_keys: bool) -> None:
    """Even when their owner removes them after the offer; an exchange of the same ranks goes on meanwhile."""
    keys = Keys.make(tmp_path / "key") if with_keys else None
    expected, places = [path.read_bytes() for path in paths], buffers(paths)
    with connected(tmp_path, 2, slots=3, keys=keys) as (giver, taker):
        gives(giver, *paths)
        tag, offered = gives(taker).offers(SECONDS)
        assert offered == {0: b"files"}
        for path in paths:
            path.unlink()
        giver.partners.begin(3, 1)
        giver.partners.end(3)
        swap(giver, taker, tag=2 * 10**6)
        gives(taker).take(0, tag, places, SECONDS)
    assert contents(places) == expected


def test_a_rank_that_has_nothing_or_cannot_read_it_answers_at_once(tmp_path: Path) -> None:
    with connected(tmp_path, 4) as (empty, broken, _, taker):
        gives(empty)
        gives(broken, tmp_path / "not there")
        assert gives(taker).offers(SECONDS)[1] == {}
        assert all(taker.service.protocol.counterparts[rank].offer is not None for rank in range(3))


def test_buffers_must_be_as_long_as_the_files(tmp_path: Path, paths: list[Path]) -> None:
    with connected(tmp_path) as (giver, taker):
        gives(giver, *paths)
        asking = gives(taker)
        tag, _ = asking.offers(SECONDS)
        places = [torch.zeros(length, dtype=torch.uint8) for length in (40, 7)]
        with pytest.raises(ExchangeTimeoutError):
            asking.take(0, tag, places, seconds=0.5)
        assert not places[0].any()


def test_a_second_offer_replaces_the_first(tmp_path: Path, paths: list[Path]) -> None:
    with connected(tmp_path) as (giver, taker):
        gives(giver, *paths)
        asking, posted = gives(taker), giver.service.protocol.counterparts[1].posted
        for _ in range(5):
            tag, _ = asking.offers(SECONDS)
            assert {name: len(sends) for name, sends in posted.items()} == {tag: 2}
        places = buffers(paths)
        asking.take(0, tag, places, SECONDS)
        assert contents(places) == [path.read_bytes() for path in paths]


def test_files_that_are_not_taken_are_closed_when_the_taker_trains(tmp_path: Path, paths: list[Path]) -> None:
    def held_open() -> set[Path]:
        """By this process."""
        names = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return {Path(os.path.realpath(name)) for name in names} & {path.resolve() for path in paths}

    with connected(tmp_path) as (giver, taker):
        gives(giver, *paths)
        assert gives(taker).offers(SECONDS)[1] == {0: b"files"}
        assert len(held_open()) == 2
        taker.partners.begin(0, 0)
        until(lambda: not held_open())


def test_a_giver_that_goes_ends_the_handover(tmp_path: Path, paths: list[Path]) -> None:
    with transport(tmp_path, 1) as taker, ThreadPoolExecutor(1) as pool:
        with transport(tmp_path, 0) as giver:
            assert all(one.wait_for(1, SECONDS) for one in (giver, taker))
            gives(giver, paths[0])
            asking = gives(taker)
            tag, _ = asking.offers(SECONDS)
            longer = torch.zeros(9, dtype=torch.uint8)  # never comes
            taking = pool.submit(asking.take, 0, tag, [longer], SECONDS)
            until(lambda: giver.service.protocol.counterparts[1].posted.keys() == set())
        with pytest.raises(ConnectionError, match="rank 0 has gone"):
            taking.result()
