"""The other replicas as a loop meets them: what happens between two local steps, and at the end."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron_noloco.attach.job_state import JobState
from megatron_noloco.attach.torch_module import torch_engine
from megatron_noloco.federation import federation_peers as module
from megatron_noloco.federation.federation_peers import FederationPeers
from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.membership import Membership
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.rounds import Replica
from megatron_noloco.job.agreement import vote
from megatron_noloco.outer import ExchangeReport, OuterOptimizer, RoundReport
from megatron_noloco.outer.health import Health
from megatron_noloco.outer.peers import Average, Boundary, JobPeers
from megatron_noloco.plans.fragments import due_after, fragment_after
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings
from megatron_noloco.training.run import Schedule
from tests.kit.fleet import noise
from tests.kit.memory_mesh import World
from tests.kit.worlds import members_of, pause

NOLOCO = NolocoSettings(local_steps=2, deadline_seconds=15.0)
FEDERATION, STEPS = FederationSettings(rounds_behind=2), 60


class Job:
    """A job of one rank, whose weights move in each local step; of a second in the world's clock.

    Attributes:
        at: the weights by the local steps done.
        reports, lines: of its rounds, and for its log.
    """

    def __init__(self, world: World, slot: int, incarnation: int = 1) -> None:
        self.members = members_of(world, slot, incarnation)
        self.mesh, self.slot, self.place = self.members.mesh, slot, Place(slot, None)
        self._membership = Membership(self.members, self.place, NOLOCO, FEDERATION, STEPS)
        self._membership.back_seconds = 100.0
        self._engine = torch_engine(nn.Linear(3, 2))
        with self._engine.writing() as write:
            write(0, torch.zeros(self._engine.length))
        replica = self._membership.replica(self._engine, seed=1)
        outer = OuterOptimizer(self._engine, None, self.place, NOLOCO, 1, replica)
        state, health = JobState(self._engine, outer, None, {}, {}), Health(self._engine, vote)
        self.peers = FederationPeers(self._membership, replica, outer, state, health)
        self.at, self.reports, self.lines = dict[int, Tensor](), list[RoundReport](), list[str]()

    def _pass(self, boundary: Boundary) -> int:
        self.lines += boundary.lines
        self.at[boundary.step] = self._engine.read()
        return boundary.step

    def live(self) -> Average:
        done = self.began = self._pass(self.peers.begin(0, takes_over=True))
        while done < STEPS:
            pause(self.mesh, 60.0 if (self.slot, done) == (3, 50) else 1.0)
            with self._engine.writing() as write:
                write(0, self._engine.read() + 0.01 * noise(self._engine.length, seed=100 * done + self.slot))
            self.reports += self.peers.rounds(done + 1)
            done = self._pass(self.peers.catch_up(done + 1))
        average = self.peers.average(done, trained=True, before_waiting=lambda: None)
        self.lines += average.lines
        self.at[STEPS] = self._engine.read()
        self.peers.stay(done)
        self.peers.close(at_once=False)
        return average


def keep_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the jobs of a world wait by its clock."""

    def sleep(seconds: float) -> None:
        pause(world.running, seconds)

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: world.now, perf_counter=lambda: world.now)
    monkeypatch.setattr(module, "time", clock)


def test_a_job_that_is_to_stop_at_its_end_waits_for_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other replica trains on."""
    world = World()
    own, other = Job(world, 0), Job(world, 1)
    keep_time(world, monkeypatch)
    monkeypatch.setattr(own.members, "_stopped", lambda: world.now > 5.0)
    end = world.spawn(own.mesh.me, lambda: own.peers.average(STEPS, True, before_waiting=lambda: None))
    world.spawn(other.mesh.me, lambda: pause(other.mesh, 10.0))
    world.run()
    assert end.result() == Average(stopped=True)


def test_a_federation_from_its_first_step_to_its_one_model(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Replica 1 is killed, and comes back when the others have their final model. Replica 2 begins late, and 3
    sleeps from its 50th local step until the others have ended.
    """
    world, jobs, ends = World(lease=5.0), dict[str, Job](), dict[str, Future[Average]]()

    def begin(name: str, slot: int, incarnation: int = 1) -> None:
        job = jobs[name] = Job(world, slot, incarnation)
        ends[name] = world.spawn(job.mesh.me, job.live)

    keep_time(world, monkeypatch)
    for name, slot in (("first", 0), ("killed", 1), ("sleeps", 3)):
        begin(name, slot)
    world.at(20.5, lambda: begin("late", 2))
    world.at(45.5, lambda: world.kill(jobs["killed"].mesh.me))
    world.at(100.5, lambda: begin("came back", 1, 2))
    world.run()

    without = "without replica 1, which is not there; without replica 3, which began no round for 15 s"
    mean = f" final average of replicas 0, 2 | {without} |"
    final = " recovered from replica {}: its state after local step 60"
    for name, lines in {
        "first": [mean],
        "killed": [],
        "sleeps": [" state after iteration 18 given", f"{final.format(0)}, "],
        "late": [" recovered from replica 3: its state after local step 18, ", mean],
        "came back": [final.format(2)],
    }.items():
        assert len(jobs[name].lines) == len(lines)
        assert all(map(str.startswith, jobs[name].lines, lines)), jobs[name].lines
    assert "this job had done 51 local steps" in jobs["sleeps"].lines[1]
    assert [job.began for job in jobs.values()] == [0, 0, 0, 18, 60]
    assert torch.equal(jobs["late"].at[18], jobs["sleeps"].at[18])
    has_final = [name for name in jobs if name != "killed"]
    assert all(torch.equal(jobs[name].at[STEPS], jobs["first"].at[STEPS]) for name in has_final)
    assert all(jobs[name].mesh.statuses.own.status.phase == "left" for name in has_final)  # type: ignore[union-attr]
    known = [{*ends[name].result().replicas} for name in has_final]
    assert known == [{0, 2}, {0, 1, 2, 3}, {0, 2}, {0, 1, 2}]
    assert {report.exchange.group for report in jobs["first"].reports} == {(0, 1), (0, 2), (0, 3), (0,)}
    assert world.now < 125.0, "nobody stays for longer than others want the final model"
    stays = "waiting for 100 s at most, to give the final model to replica 1 if it comes back"
    assert capfd.readouterr().err == "".join(f"replica {slot}: {stays}\n" for slot in (0, 2))


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
    )
    checked = list[int]()
    anything: Any = SimpleNamespace(check=lambda: checked.append(len(outer.ran)))
    replica: Any = Replica(Gather(alone(7)), Place(0, None), anything, None)
    peers = FederationPeers(membership, replica, outer, anything, anything)  # type: ignore[arg-type]
    boundary = peers.leave(done)
    assert checked == [0], "weights that are not finite come to no partner"
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
