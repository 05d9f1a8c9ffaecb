"""The other replicas as a loop meets them: what happens between two local steps, and at the end."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatron_noloco.federation.federation_peers import FederationPeers
from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.rounds import Replica
from megatron_noloco.outer import ExchangeReport, RoundReport
from megatron_noloco.outer.peers import Boundary, JobPeers
from megatron_noloco.plans.fragments import due_after, fragment_after
from megatron_noloco.plans.topology import Place
from megatron_noloco.training.run import Schedule


class Outer:
    """Stands for an outer optimizer whose rounds count or do not."""

    weights = SimpleNamespace(length=7)

    def __init__(self, counts: bool) -> None:
        self.counts, self.ran = counts, list[tuple[int, int]]()

    def finish(self) -> list[RoundReport]:
        return []

    def run_round(self, index: int, fragment: int) -> RoundReport:
        self.ran.append((index, fragment))
        return RoundReport(index, ExchangeReport((0, 1) if self.counts else (0,)), 0.0, 0.0, fragment)


@given(st.data())
def test_a_job_that_leaves_goes_on_where_its_last_round_was_due(data: st.DataObject) -> None:
    """Before the round that is due next, unless that is now, or after the last step."""
    fragments = data.draw(st.integers(1, 3))
    local_steps = fragments * data.draw(st.integers(1, 4))
    done, last = data.draw(st.integers(1, 40)), data.draw(st.integers(40, 60) | st.none())
    seconds, outer = data.draw(st.sampled_from([0.0, 5.0])), Outer(data.draw(st.booleans()))
    membership: Any = SimpleNamespace(
        members=None,
        steps=last,
        noloco=SimpleNamespace(local_steps=local_steps, fragments=fragments),
        federation=SimpleNamespace(leave_seconds=seconds),
        states=None,
        catch_up=None,
    )
    anything: Any = SimpleNamespace(check=lambda: True)
    replica: Any = Replica(Gather(alone(7)), Place(0, None), anything, None)
    peers = FederationPeers(membership, replica, outer, anything, anything)  # type: ignore[arg-type]
    boundary = peers.leave(done)
    assert boundary.left_out == boundary.step - done == boundary.numbers.get("total/skipped_ahead", 0)
    assert len(boundary.rounds) == len(outer.ran) <= 1
    schedule = local_steps, fragments
    due = next(step for step in range(done + 1, done + local_steps + 1) if fragment_after(step, *schedule))
    if outer.ran:
        assert due_after(*outer.ran[0], *schedule) == due
    runs = seconds > 0 and fragment_after(done, *schedule) is None and (last is None or due <= last)
    assert bool(outer.ran) == runs
    assert boundary.step == (due if runs and outer.counts else done)
    assert bool(boundary.lines) == (boundary.step > done)


@given(st.integers(0, 100), st.booleans())
def test_the_replicas_of_a_job_train_in_step(done: int, takes_over: bool) -> None:
    outer: Any = Outer(counts=True)
    peers = JobPeers(outer)
    for boundary in (peers.begin(done, takes_over), peers.catch_up(done), peers.leave(done)):
        assert boundary == Boundary(done)
    assert not peers.average(done, trained=False, before_waiting=lambda: None).reports
    assert peers.summary(1, 1) == ""


@given(st.integers(0, 30), st.integers(1, 30), st.integers(0, 9))
def test_what_was_due_in_a_step_left_out_is_done_after_it(before: int, steps: int, interval: int) -> None:
    done, last = before + steps, 40
    schedule = Schedule(last, interval, interval, interval)
    due = done == last or any(interval and step % interval == 0 for step in range(before + 1, done + 1))
    found = schedule.logs(before, done), schedule.saves(before, done), schedule.evaluates_after(before, done)
    assert found == (due, due, due)
