"""Ranks that no other rank can connect to, and a thread that fails."""

import io
import os
import resource
from contextlib import ExitStack, closing, redirect_stderr, suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megatron_noloco.federation import membership, service
from megatron_noloco.federation.frames import Frame, Kind, read
from megatron_noloco.federation.handover import Handover
from megatron_noloco.federation.keeping_up import KeepingUp
from megatron_noloco.federation.links import Links
from megatron_noloco.federation.membership import Membership
from megatron_noloco.federation.network import FederationTransport, Network
from megatron_noloco.federation.outbox import Outbox
from megatron_noloco.federation.rendezvous import SharedFolder
from megatron_noloco.federation.service import ServiceFailedError
from megatron_noloco.job.activity import now
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings
from megatron_noloco.transport.interface import Message
from tests.harness import free_port
from tests.unit.federated import LOCAL, PATIENCE, RUN, SECONDS, connected, members, swap, transport, until


def present(ranks: list[FederationTransport]) -> list[list[int]]:
    return [rank.present() for rank in ranks]


@pytest.mark.parametrize(("hidden", "port"), ["hp", "ph"])
def test_one_side_that_can_be_reached_is_enough(tmp_path: Path, hidden: str, port: str) -> None:
    with members(tmp_path, hidden + port) as ranks:
        until(lambda: present(ranks) == [[1], [0]])
        swap(ranks[0], ranks[1], tag=1)


def test_a_pair_has_one_connection(tmp_path: Path) -> None:
    """The rank with the higher number opens it."""
    with connected(tmp_path, 3) as ranks:
        assert [sorted(rank.service._dialled) for rank in ranks] == [[], [0], [0, 1]]


def test_a_rank_that_cannot_be_reached_where_it_says_connects_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_BACK_SECONDS", 0.5)
    folder = SharedFolder(tmp_path, RUN)
    listen = f"tcp://127.0.0.1:{free_port()}"
    nowhere = Network(folder, RUN, listen, advertise="tcp://127.0.0.2:1")
    with (
        closing(FederationTransport(Place(0, 2), nowhere, PATIENCE)) as first,
        closing(FederationTransport(Place(1, 2), Network(folder, RUN, LOCAL), PATIENCE)) as second,
    ):
        until(lambda: present([first, second]) == [[1], [0]])
        swap(first, second, tag=1)
        assert list(first.service._dialled) == [1]


def test_a_rank_that_moves_is_found_although_another_took_its_place(tmp_path: Path) -> None:
    """The one that finds it cannot be reached, so it is the one that connects."""
    folder = SharedFolder(tmp_path, RUN)
    port = free_port()
    place = Network(folder, RUN, f"tcp://127.0.0.1:{port}")
    with ExitStack() as stack:
        hidden = stack.enter_context(
            closing(FederationTransport(Place(2, 3), Network(folder, RUN, None), PATIENCE))
        )
        with closing(FederationTransport(Place(0, 3), place, PATIENCE)):
            until(lambda: hidden.present() == [0])
        stack.enter_context(closing(FederationTransport(Place(1, 3), place, PATIENCE)))
        until(lambda: hidden.present() == [1])
        moved = stack.enter_context(
            closing(FederationTransport(Place(0, 3), Network(folder, RUN, LOCAL), PATIENCE))
        )
        until(lambda: hidden.present() == [0, 1])
        swap(moved, hidden, tag=1)


def test_lines_that_others_cause_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with transport(tmp_path, 0) as one:
        for number in range(2000):
            one.service.protocol.warn(f"line {number}")
    assert capfd.readouterr().err.count("line") < 2000


def test_a_rank_connects_to_more_than_a_thousand(tmp_path: Path) -> None:
    links = Links(None, 1, None, Mock())
    assert links._context.max_sockets > 3 * 1000
    links.close(linger=False)


@pytest.mark.parametrize("spare", range(3))  # each link needs three
def test_a_rank_that_can_open_no_more_files_joins_others_later(tmp_path: Path, spare: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        redirect_stderr(io.StringIO()) as output,
        transport(tmp_path / "one", 0) as first,
        transport(tmp_path / "two", 1) as second,
    ):
        with ExitStack() as stack:
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            files = []
            with suppress(OSError):
                while True:
                    files.append(stack.enter_context(open(os.devnull)))
            for file in files[:spare]:
                file.close()
            second.service.ask(first.address.endpoint)
            second.service.learn({0: first.address})
            until(lambda: "other ranks cannot be joined now: Too many open files" in output.getvalue())
            assert second.present() == []
        until(lambda: present([first, second]) == [[1], [0]])
        swap(first, second, tag=1)


def test_two_hidden_ranks_never_meet(tmp_path: Path) -> None:
    with members(tmp_path, "phh") as ranks:
        until(lambda: present(ranks) == [[1, 2], [0], [0]])
        assert ranks[1].wait_for(2, SECONDS)
        assert not ranks[1].wait_for(3, 0.5)
        assert [ranks[1].partners.reachable(rank) for rank in range(3)] == [True, False, False]
        flight = ranks[1].post([], [Message(2, torch.zeros(1))], tag=1)
        with pytest.raises(ConnectionError, match="rank 2 is not connected"):
            flight.finish(SECONDS)


@pytest.mark.parametrize("continues", [False, True])
def test_a_job_that_continues_or_finds_trained_ones_does_not_wait_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, continues: bool
) -> None:
    monkeypatch.setattr(membership, "TOGETHER_SECONDS", 0.1)
    settings = FederationSettings(slots=3, start_with=3)
    with members(tmp_path, "ph") as (first, second):
        noloco = NolocoSettings(deadline_seconds=0.3)
        joining = Membership(second, Mock(), Mock(), noloco, settings)
        assert second.wait_for(1, SECONDS)
        assert joining.wait_for_start(continues) == continues
        assert now.state.part == "2 of 3 replicas are there"
        first.partners.begin(1, None)
        until(lambda: second.begun() == {0: 1})
        assert joining.wait_for_start(continues=False)
    with members(tmp_path / "hidden", "hhp") as ranks:  # two of them never see each other
        assert all(rank.wait_for(2, SECONDS) for rank in ranks)


class Lossy:
    """A link that takes all frames; notes their kinds."""

    up = True

    def __init__(self) -> None:
        self.taken: list[Kind] = []
        self.full = False

    def send(self, header: bytes, *_: np.ndarray) -> bool:
        frame = read(header)
        assert frame is not None
        self.taken += [] if self.full else [frame.kind]
        return not self.full


def test_chunks_whose_confirmations_are_lost_keep_no_later_chunks_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As long as confirmations come, however seldom, no more are sent."""
    clock = 1000.0
    monkeypatch.setattr("megatron_noloco.federation.outbox.time.monotonic", lambda: clock)
    link, outbox = Lossy(), Outbox()
    outbox.use(link)  # type: ignore[arg-type]
    chunk = Frame(Kind.DATA, RUN, 0, 1, 1), np.zeros(1, np.uint8)
    outbox.chunks(1, iter([chunk] * 5))
    outbox.drop({1})
    outbox.chunks(2, iter([chunk] * 5))
    assert len(link.taken) == 4
    clock = 1050.0
    outbox.confirm()
    clock = 1100.0
    outbox.confirm()
    assert len(link.taken) == 6
    clock = 1159.0
    outbox.flush()
    assert len(link.taken) == 6
    clock = 1161.0
    outbox.flush()
    assert len(link.taken) == 4 + 5


def test_a_rank_that_reads_nothing_costs_no_memory() -> None:
    link, outbox = Lossy(), Outbox()
    outbox.use(link)  # type: ignore[arg-type]
    link.full = True
    for _ in range(5000):
        outbox.control(Frame(Kind.GOT, RUN, 0, 1, 1))
    assert len(outbox._control) < 5000


def test_jobs_with_more_slots_exchange_with_those_that_have_fewer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of a slot that the other does not have is not exchanged with, which is reported."""
    with ExitStack() as stack:
        few, more, new = (stack.enter_context(transport(tmp_path, *at)) for at in ((0, 2), (1, 3), (2, 3)))
        until(lambda: present([few, more, new]) == [[1], [0, 2], [1]])
        swap(few, more, tag=1)
        swap(more, new, tag=1)
        until(lambda: few.service.protocol.dropped["unknown sender"] > 0)
    assert (
        "rank 2 is not exchanged with: its job has more slots; give this one as many"
        in capfd.readouterr().err
    )


def test_a_failure_of_the_thread_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with transport(tmp_path, 0) as one:
        monkeypatch.setattr(one.service.protocol, "tick", lambda: 1 / 0)
        until(lambda: not one.service._thread.is_alive())
        for use in (one.present, lambda: one.partners.begin(1, None), lambda: one.partners.standing(1, 1)):
            with pytest.raises(ServiceFailedError, match="has failed: ZeroDivisionError"):
                use()
        noloco, settings = NolocoSettings(), FederationSettings(slots=2)
        handover, keeping_up = Handover(one), KeepingUp(one, noloco, settings)
        Membership(one, keeping_up, handover, noloco, settings).leave()
        assert handover._closed
        assert one._closing.is_set()
    assert "the federation's thread has failed" in capfd.readouterr().err
