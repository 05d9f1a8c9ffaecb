"""Who connects to whom; and a thread that fails."""

import io
import os
import resource
import time
from contextlib import ExitStack, redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_noloco.federation.service import ServiceFailedError

from megatron_noloco.federation import membership, peers
from megatron_noloco.federation.membership import Membership
from megatron_noloco.federation.network import FederationTransport, Network
from megatron_noloco.federation.rendezvous import SharedFolder
from megatron_noloco.job.activity import now
from megatron_noloco.settings import FederationSettings, NolocoSettings
from megatron_noloco.transport.interface import Message
from tests.harness import free_port
from tests.unit.federated import LOCAL, RUN, SECONDS, connected, members, opened, swap, transport, until


def dialled(rank: FederationTransport) -> list[int]:
    """The slots to which a replica has opened the connection."""
    sessions = [(slot, peer.session) for slot, peer in rank.service.peers.others.items()]
    return [slot for slot, session in sessions if session is not None and session.control.endpoint]


def present(ranks: list[FederationTransport]) -> list[list[int]]:
    return [rank.present() for rank in ranks]


@pytest.mark.parametrize(("hidden", "port"), ["hp", "ph"])
def test_one_side_that_can_be_reached_is_enough(tmp_path: Path, hidden: str, port: str) -> None:
    with members(tmp_path, hidden + port) as ranks:
        until(lambda: present(ranks) == [[1], [0]])
        swap(ranks[0], ranks[1], tag=1)


def test_a_pair_has_one_session(tmp_path: Path) -> None:
    """The replica with the higher slot opens it."""
    with connected(tmp_path, 3) as ranks:
        assert [dialled(rank) for rank in ranks] == [[], [0], [0, 1]]


def test_a_rank_that_cannot_be_reached_where_it_says_connects_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_BACK_SECONDS", 0.5)
    folder = SharedFolder(tmp_path, RUN)
    listen = f"tcp://127.0.0.1:{free_port()}"
    nowhere = Network(folder, RUN, listen, advertise="tcp://127.0.0.2:1")
    with opened(nowhere, Network(folder, RUN, LOCAL)) as (first, second):
        until(lambda: present([first, second]) == [[1], [0]])
        swap(first, second, tag=1)
        assert dialled(first) == [1]


def test_a_rank_that_moves_is_found_although_another_took_its_place(tmp_path: Path) -> None:
    """The one that finds it cannot be reached, so it is the one that connects."""
    folder = SharedFolder(tmp_path, RUN)
    place = Network(folder, RUN, f"tcp://127.0.0.1:{free_port()}")
    with opened(Network(folder, RUN, None), slot=2, slots=3) as (hidden,):
        with opened(place, slots=3):
            until(lambda: hidden.present() == [0])
        with opened(place, slot=1, slots=3):
            until(lambda: hidden.present() == [1])
            with transport(tmp_path, 0, 3) as moved:
                until(lambda: hidden.present() == [0, 1])
                swap(moved, hidden, tag=1)


def test_a_rank_that_can_open_no_more_files_joins_others_later(tmp_path: Path) -> None:
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
            second.service.do(second.service.peers.ask_for_addresses, first.address.endpoint)
            second.service.do(second.service.peers.directory.merge, {0: first.address})
            until(lambda: "cannot be joined now: Too many open files" in output.getvalue())
            assert second.present() == []
        until(lambda: present([first, second]) == [[1], [0]])
        swap(first, second, tag=1)


@pytest.mark.slow
def test_a_process_is_exchanged_with_again_when_its_duplicate_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_RIVAL_SECONDS", 0.5)
    with (
        redirect_stderr(io.StringIO()),
        transport(tmp_path, 0) as original,
        transport(tmp_path, 1) as partner,
    ):
        until(lambda: present([original, partner]) == [[1], [0]])
        with transport(tmp_path, 0) as duplicate:
            both = [rank.service.peers.directory for rank in (original, duplicate)]
            until(lambda: all(one._claimed for one in both) and present([duplicate, original]) == [[1], []])
            time.sleep(2)
            assert present([duplicate, original]) == [[1], []], "it is there, and nobody changes"
        until(lambda: present([original, partner]) == [[1], [0]])
        swap(original, partner, tag=1)


def test_two_hidden_ranks_never_meet(tmp_path: Path) -> None:
    with members(tmp_path, "phh") as ranks:
        until(lambda: present(ranks) == [[1, 2], [0], [0]])
        assert ranks[1].wait_for(2, SECONDS)
        assert not ranks[1].wait_for(3, 0.5)
        assert ranks[1].partners.hidden() == {1, 2}
        flight = ranks[1].post([], [Message(2, torch.zeros(1))], tag=1)
        with pytest.raises(ConnectionError, match="rank 2 is not connected"):
            flight.finish(SECONDS)


@pytest.mark.parametrize("continues", [False, True])
def test_a_job_that_continues_or_finds_trained_ones_does_not_wait_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, continues: bool
) -> None:
    monkeypatch.setattr(membership, "TOGETHER_SECONDS", 0.1)
    settings = FederationSettings(start_with=3)
    with members(tmp_path, "ph") as (first, second):
        noloco = NolocoSettings(deadline_seconds=0.3)
        joining = Membership(second, second.place, noloco, settings)
        assert second.wait_for(1, SECONDS)
        assert joining.wait_for_start(done=int(continues)) == continues
        assert now.state.part == "2 of 3 replicas are there"
        first.partners.begin(1, None)
        until(lambda: second.begun() == {0: 1})
        assert joining.wait_for_start(done=0)
    with members(tmp_path / "hidden", "hhp") as ranks:  # two of them never see each other
        assert all(rank.wait_for(2, SECONDS) for rank in ranks)


def test_a_new_job_that_is_refused_ends_and_one_that_continues_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(membership, "TOGETHER_SECONDS", 0.1)
    with transport(tmp_path, 0) as one:
        joining = Membership(one, one.place, NolocoSettings(), FederationSettings())
        one.service.peers.refusal = "replica 1 is refused: its job differs from this one in tokenizer"
        assert joining.wait_for_start(done=1)
        with pytest.raises(ValueError, match=r"^replica 1 is refused: "):
            joining.wait_for_start(done=0)


@pytest.mark.parametrize("streams", [1, 4])
def test_bulk_data_go_over_all_streams(tmp_path: Path, streams: int) -> None:
    """As many as either side wants."""
    one = Network(SharedFolder(tmp_path, RUN), RUN, LOCAL, chunk_bytes=1000)
    with opened(one, replace(one, streams=streams)) as (first, second):
        until(lambda: present([first, second]) == [[1], [0]])
        used, sent = set[object](), torch.arange(10**6, dtype=torch.int32)
        for rank in (first, second):
            session = rank.service.peers.others[1 - rank.rank].session
            assert session is not None
            until(lambda session=session: len(session.streams) == streams)  # type: ignore[misc]
            for wire in session.streams:
                refill = wire.refill
                wire.refill = lambda wire=wire, refill=refill: [*refill(), used.add(wire)][:-1]  # type: ignore[func-returns-value,misc]
        received = torch.zeros_like(sent)
        flights = [first.post([Message(1, sent)], [], 1), second.post([], [Message(0, received)], 1)]
        for flight in flights:
            flight.finish(SECONDS)
        assert torch.equal(sent, received)
        assert len(used) >= streams


def test_jobs_with_more_slots_exchange_with_those_that_have_fewer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of a slot that the other does not have is not exchanged with, which is reported."""
    with ExitStack() as stack:
        few, more, new = (stack.enter_context(transport(tmp_path, *at)) for at in ((0, 2), (1, 3), (2, 3)))
        until(lambda: present([few, more, new]) == [[1], [0, 2], [1]])
        swap(few, more, tag=1)
        swap(more, new, tag=1)
        until(lambda: len(few.service.peers.directory.addresses) > 1 and new.service.peers._warnings != set())
    lines = capfd.readouterr().err.splitlines()
    assert (
        "replica 0: replica 2 is not exchanged with: its job has more slots; give this one as many" in lines
    )
    assert "replica 2: replica 0 is not exchanged with: its job has fewer slots; give it as many" in lines


def test_a_failure_of_the_thread_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with transport(tmp_path, 0) as one:
        monkeypatch.setattr(one.service.peers, "tick", lambda: 1 / 0)
        until(lambda: not one.service._thread.is_alive())
        for use in (one.present, lambda: one.partners.begin(1, None), lambda: one.partners.standing(1, 1)):
            with pytest.raises(ServiceFailedError, match="has failed: ZeroDivisionError"):
                use()
        noloco, settings = NolocoSettings(), FederationSettings()
        Membership(one, one.place, noloco, settings).leave()
        assert one._closing.is_set()
    assert "the federation's thread has failed" in capfd.readouterr().err
