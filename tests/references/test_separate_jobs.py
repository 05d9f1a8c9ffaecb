"""NoLoCo attached to ordinary jobs, each of which is one replica."""

import copy
import io
import multiprocessing
import re
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from megatron_noloco.attach import Attached, ReplicaGroups, attach
from megatron_noloco.federation import membership
from megatron_noloco.federation.compatibility import differences
from megatron_noloco.federation.members import Members
from megatron_noloco.federation.network import Network
from megatron_noloco.job import leaving
from megatron_noloco.outer import PartnerLostError, RoundReport
from megatron_noloco.settings import FederationSettings, NolocoSettings
from tests.kit.golden import check
from tests.kit.jobs import (
    SECONDS,
    assert_by_the_equations,
    federation,
    members_of,
    network_of_attach,
    paper,
    refusal,
    run_jobs,
    trained,
)
from tests.kit.ranks import run_ranks, until

SEED, K, STEPS = 5, 2, 12
SETTINGS = paper(local_steps=K)
DELAY_CHOSEN = NolocoSettings(overlap_steps="auto")
OVERLAPPED = paper(local_steps=4, overlap_steps=2, fragments=2, payload="int8")


class Loop:
    """An ordinary loop, in plain torch; of several ranks, with DistributedDataParallel."""

    def __init__(self, replica: int, rank: int, group: dist.ProcessGroup | None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.module: nn.Module = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))
        self.model = (
            self.module if group is None else DistributedDataParallel(self.module, process_group=group)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.replica, self.rank = replica, rank

    def step(self, step: int) -> None:
        draw = torch.Generator().manual_seed(1000 * step + 10 * self.replica + self.rank)
        points = torch.rand(8, 3, generator=draw)
        self.optimizer.zero_grad()
        (self.model(points) - points.prod(1, keepdim=True)).square().mean().backward()
        self.optimizer.step()

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.module.parameters()).detach().clone()

    def state(self) -> list[Any]:
        return [self.module.state_dict(), self.optimizer.state_dict()]

    def load(self, state: list[Any]) -> None:
        self.module.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])


def of_job(slot: int, rank: int, seed: int = 0) -> Loop:
    return Loop(slot, rank, dist.group.WORLD if dist.is_initialized() else None, seed)


def train(loop: Loop, noloco: Attached, steps: int = STEPS) -> list[Tensor]:
    """The weights after each step."""
    found = []
    while noloco.done < steps:
        loop.step(noloco.done)
        noloco.step()
        found.append(loop.weights())
    return found


def in_one_job(rank: int) -> Loop:
    """Of two replicas of two ranks."""
    return Loop(rank // 2, rank % 2, ReplicaGroups(2).get_data_parallel_group())


def together(rank: int, world_size: int, settings: NolocoSettings) -> list[Tensor]:
    loop = in_one_job(rank)
    noloco = attach(loop.model, settings, replicas=2, seed=SEED)
    found = train(loop, noloco)
    noloco.close()
    dist.barrier()
    return [*found, loop.weights()]


def in_rounds(rank: int, world_size: int) -> dict[str, Tensor]:
    loop = in_one_job(rank)
    noloco = attach(loop.model, SETTINGS, replicas=2, seed=SEED)
    found = trained(noloco, loop.step, loop.weights, STEPS // K)
    dist.barrier()
    return found


def test_rounds_of_a_torch_module_are_those_of_the_method() -> None:
    assert_by_the_equations(run_ranks(4, in_rounds), 2, SEED)


def interrupted(slot: int, rank: int, folder: Path, settings: NolocoSettings) -> Tensor:
    """Half of the steps, then the other half in a loop made anew from what was saved."""
    loop = of_job(slot, rank)
    noloco = attach(loop.model, settings, **federation(folder / "first", slot, 2), seed=SEED)
    train(loop, noloco, STEPS // 2 + 1)  # in the middle of a phase, or of an exchange
    file = folder / f"saved_{slot}_{rank}.pt"
    torch.save([*loop.state(), noloco.state_dict()], file)
    before = loop.weights()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        noloco.close()
    assert torch.equal(loop.weights(), before), "after an exception nothing is merged"

    *state, saved = torch.load(file, weights_only=True)
    loop = of_job(slot, rank, seed=9)
    loop.load(state)
    there = federation(folder / "second", slot, 2)
    noloco = attach(loop.model, settings, **there, seed=SEED, state=saved)
    if rank == 0:  # it leads the job; a job that continues waits for no other
        until(members_of(noloco).present)
    train(loop, noloco)
    noloco.close()
    return loop.weights()


@pytest.mark.parametrize(
    "settings", [SETTINGS, paper(local_steps=4, overlap_steps=2)], ids=["plain", "overlap"]
)
def test_jobs_that_continue_train_as_one_job_does(tmp_path: Path, settings: NolocoSettings) -> None:
    """To the last bit, also where a round that is under way is merged at the end."""
    found = run_jobs(tmp_path, 2, 2, interrupted, tmp_path, settings)
    expected = run_ranks(4, together, settings)
    *_, last, closed = expected[0]
    assert torch.equal(last, closed) == (settings.overlap_steps == 0)
    for slot in range(2):
        for rank in range(2):
            assert torch.equal(found[slot][rank], expected[2 * slot + rank][-1])


def leaves(slot: int, rank: int, folder: Path) -> list[Any]:
    """Replica 1 leaves after 3 rounds. By round: the weights before and after, the group, what was missed."""
    loop = of_job(slot, rank)
    noloco = attach(loop.model, SETTINGS, **federation(folder, slot, 2), seed=SEED)
    found = []
    for step in range(6 * K):
        if step == 3 * K:
            if slot == 1:
                noloco.close()
                (folder / "left").touch()
                break
            until((folder / "left").exists)
        loop.step(step)
        before = loop.weights()
        for report in noloco.step():
            found.append((before, loop.weights(), report.exchange.group, report.exchange.missed))
    if slot == 0:
        noloco.close()
    return found


def test_a_round_is_skipped_when_its_partner_is_lost(tmp_path: Path) -> None:
    found = run_jobs(tmp_path, 2, 1, leaves, tmp_path)[0][0]
    assert [group for _, _, group, _ in found] == [(0, 1)] * 3 + [(0,)] * 3
    assert [bool(missed) for *_, missed in found] == [False] * 3 + [True] * 3
    assert all(re.match(r"replica 1[ :]", missed) for *_, missed in found[3:])
    (_, first, *_), (_, second, *_), (theta, phi, *_) = found[1:4]
    expected = second + 0.5 * (second - first) + 0.7 * (theta - second)
    torch.testing.assert_close(phi, expected, rtol=0, atol=1e-6)


def ends_early(rank: int, world_size: int, settings: NolocoSettings) -> str:
    loop = Loop(rank, 0, None)
    noloco = attach(loop.model, settings, replicas=world_size)
    if rank == 1:
        train(loop, noloco, 2)
        return ""  # and this process ends
    with pytest.raises(PartnerLostError) as caught:
        train(loop, noloco)
    return f"{caught.value} ({type(caught.value.__cause__).__name__})"


def test_in_one_job_a_partner_that_is_gone_is_reported() -> None:
    line = run_ranks(2, ends_early, OVERLAPPED)[0]
    assert re.match(r"replica 0 lost a partner in round \d.*: rank 1 has gone: the connection was lost", line)


def fails(slot: int, rank: int, folder: Path) -> list[tuple[int, ...]]:
    """Rank 1 of job 0 raises while a round is under way, and rank 0 when it misses it. The groups of rounds."""
    loop = of_job(slot, rank)
    settings = paper(local_steps=4, overlap_steps=3)
    noloco = attach(loop.model, settings, **federation(folder, slot, 2), seed=SEED)
    groups = []
    try:
        while noloco.done < STEPS:
            loop.step(noloco.done)
            groups += [report.exchange.group for report in noloco.step()]
            if (slot, rank, noloco.done) == (0, 1, 5):
                raise KeyboardInterrupt
    except (KeyboardInterrupt, RuntimeError):
        noloco.close()
        return groups
    noloco.close()
    return groups


def test_a_rank_that_fails_during_a_round_does_not_wait_for_it(tmp_path: Path) -> None:
    """The other ranks of its job are not there to decide on the round. Those of its partner go on."""
    first, second = run_jobs(tmp_path, 2, 2, fails, tmp_path, timeout=60)
    assert first == [[], []]
    assert [groups[1:] for groups in second] == [[(1,)]] * 2, "the first may have come to its end"


def others_are_in(members: Members, round_index: int) -> bool:
    return [one.begun for one in members.present().values()] == [round_index]


def is_slow(slot: int, rank: int, folder: Path) -> tuple[int, list[str]]:
    """Return steps and missed partners; replica 1 takes no step before replica 0 is at the next exchange."""
    loop = of_job(slot, rank)
    there = federation(folder, slot, 2, skip_local_steps=True)
    settings = paper(local_steps=8)
    noloco = attach(loop.model, settings, **there, seed=SEED)
    steps, missed = 0, []
    for index in range(3):
        if slot == 1:
            until(partial(others_are_in, members_of(noloco), index))
        while noloco.done < 8 * (index + 1):
            loop.step(noloco.done)
            missed += [report.exchange.missed for report in noloco.step()]
            steps += 1
    noloco.close()
    return steps, missed


def test_slow_job_skips_steps_but_no_round(tmp_path: Path) -> None:
    (quick, of_quick), (slow, of_slow) = (job[0] for job in run_jobs(tmp_path, 2, 1, is_slow, tmp_path))
    assert quick == 3 * 8
    assert slow <= 3 * 3, "two until it looks, and the last before the round"
    assert of_quick == of_slow == [""] * 3


def stands_still(slot: int, rank: int, folder: Path) -> tuple[str, list[str]]:
    """After its first step, until the watchdog has spoken. What it said; the threads that are left of it."""
    leaving.POLL_SECONDS, membership.FIRST_SECONDS = 0.02, 0.0
    loop = of_job(slot, rank)
    noloco = attach(loop.model, SETTINGS, **federation(folder, slot, 2, start_with=1), seed=SEED)
    with redirect_stderr(io.StringIO()) as output:
        noloco.watch(0.05)
        loop.step(0)
        noloco.step()
        until(lambda: "local step 2\n" in output.getvalue())
        noloco.close()
    left = [one.name for one in threading.enumerate() if one.name == "watchdog"]
    return output.getvalue().splitlines()[-1], left


def test_a_rank_that_stands_still_says_where(tmp_path: Path) -> None:
    line, left = run_jobs(tmp_path, 1, 1, stands_still, tmp_path)[0][0]
    assert not left
    assert re.fullmatch(r"replica 0, rank 0 has stood still for \d+ s training: local step 2", line)


def with_no_messages(slot: int, rank: int, folder: Path) -> Tensor:
    """What this rank exchanges, after rounds, a handed-over state and the final average."""
    loop = Loop(slot, rank, dist.new_group(backend="gloo"))
    sent = torch.tensor(rank)
    dist.broadcast(sent, src=0)
    assert sent == rank, "the default group carries nothing"
    if slot == 0:
        membership.FIRST_SECONDS = 0.0  # nobody is there to be waited for
    else:
        until((folder / "trained").exists)
    options = federation(folder, slot, 2, start_with=1, rounds_behind=1)
    noloco = attach(loop.model, SETTINGS, **options, seed=SEED, inner=loop.optimizer)
    assert (noloco.taken > 0) == (slot == 1)
    while noloco.done < 3 * STEPS:
        loop.step(noloco.done)
        noloco.step()
        if noloco.done == STEPS and slot == rank == 0:
            (folder / "trained").touch()
            until(members_of(noloco).present)
    (report,) = noloco.average()
    assert report.group == (0, 1)
    weights = noloco.outer.weights.read()
    noloco.close()
    return weights


def test_control_messages_do_not_use_the_default_group(tmp_path: Path) -> None:
    """It may be NCCL's. Torch's "fake" one sends nothing, so what is received over it is wrong."""
    found = run_jobs(tmp_path, 2, 2, with_no_messages, tmp_path, backend="fake")
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def average_together(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    loop = Loop(rank, 0, None)
    noloco = attach(loop.model, SETTINGS, replicas=world_size, seed=SEED)
    train(loop, noloco, STEPS + 1)
    before = loop.weights()
    noloco.average()
    dist.barrier()
    return before, loop.weights()


def test_at_the_end_of_one_job_there_is_one_model() -> None:
    found = run_ranks(3, average_together)
    mean = torch.stack([before for before, _ in found]).mean(0)
    for _, after in found:
        torch.testing.assert_close(after, mean, rtol=0, atol=1e-6)


def test_jobs_that_differ_at_start_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def federation_of(
        loop: Loop, settings: NolocoSettings = SETTINGS, slot: int = 0, slots: int = 2, **options: Any
    ) -> object:
        there = federation(tmp_path, slot, slots)
        return network_of_attach(monkeypatch, loop.model, settings, **there, **options).run

    wider = of_job(0, 0)
    wider.model = nn.Linear(4, 1)
    found = [
        federation_of(of_job(0, 0)),
        federation_of(of_job(0, 0, seed=1)),
        federation_of(wider),
        federation_of(of_job(0, 0), seed=1),
        federation_of(of_job(0, 0), paper(local_steps=K + 1)),
    ]
    assert federation_of(of_job(1, 0), slot=1) == federation_of(of_job(0, 0), slots=3) == found[0]
    of_numpy: Any = {"slot": np.int64(1), "seed": np.int64(0)}
    assert federation_of(of_job(1, 0), paper(local_steps=np.int64(K)), **of_numpy) == found[0]
    assert len(set(found)) == len(found)


class Partly(nn.Module):
    """A model that is trained in part, with a buffer."""

    def __init__(self, frozen: float = 1.0, buffer: float = 1.0, name: str = "trained") -> None:
        super().__init__()
        self.base = nn.Parameter(torch.full((2,), frozen), requires_grad=False)
        self.register_parameter(name, nn.Parameter(torch.zeros(2, 3)))
        self.register_buffer("scale", torch.full((2,), buffer), persistent=False)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Partly(frozen=2.0), "frozen weights"),
        (Partly(buffer=2.0), "buffers"),
        (Partly(name="other"), "names and shapes"),
    ],
)
def test_jobs_with_other_buffers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: nn.Module, named: str
) -> None:
    """As attach compares it; wrappers make no difference."""

    def network_of(model: nn.Module) -> Network:
        return network_of_attach(monkeypatch, model, SETTINGS, **federation(tmp_path, 0, 2))

    first, second = network_of(Partly()), network_of(other)
    assert differences(first.digests, second.digests) == named
    wrapped: Any = torch.compile(Partly())
    run, of_same, of_other = (
        (one.run, one.first.kind, one.digests) for one in (first, network_of(wrapped), second)
    )
    assert run == of_same != of_other


def test_a_job_that_slept_takes_over_a_state_before_it_exchanges(tmp_path: Path) -> None:
    """While it sleeps, the other one goes on. Its threads answer, as those of a job that hangs do."""
    loops, at, awake = [of_job(slot, 0) for slot in range(2)], dict[int, Tensor](), threading.Event()
    settings = paper(local_steps=K, deadline_seconds=10.0)
    changes = {"rounds_behind": 3, "shortest_deadline_seconds": 0.4}

    def made(slot: int) -> Attached:
        return attach(
            loops[slot].model,
            settings,
            inner=loops[slot].optimizer,
            **federation(tmp_path, slot, 2, **changes),
        )

    def trains(noloco: Attached) -> None:
        while not awake.is_set():
            loops[0].step(noloco.done)
            noloco.step()
            at[noloco.done] = loops[0].weights()

    with ThreadPoolExecutor(2) as pool:
        other, own = pool.map(made, range(2))
        running = pool.submit(trains, other)
        try:
            reports: list[RoundReport] = []
            while own.done < 2 * K:
                loops[1].step(own.done)
                reports += own.step()
            assert [report.exchange.group for report in reports] == [(0, 1)] * 2
            while other.done <= 10 * K:
                time.sleep(0.01)
            reports.clear()
            while own.taken < 0:
                loops[1].step(own.done)
                reports += own.step()
            assert own.done == own.taken > 10 * K
            assert torch.equal(loops[1].weights(), at[own.done])
            assert [report.exchange.group for report in reports] == [(1,)] * len(reports)
        finally:
            awake.set()
        running.result(SECONDS)
        for noloco in (other, own):
            noloco.close()


def test_a_job_that_met_no_other_says_so_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_noloco.federation.membership.FIRST_SECONDS", 0.0)
    loop = of_job(0, 0)
    noloco = attach(loop.model, SETTINGS, **federation(tmp_path, 0, 2, start_with=1))
    train(loop, noloco, 3 * K)
    with pytest.warns(UserWarning, match="^none of this job's 3 rounds had a partner"):
        noloco.close()


def what_is_refused(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    module, there = nn.Linear(2, 2), federation(folder, 0, 2)
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    half = DistributedDataParallel(module, process_group=alone)
    whole = DistributedDataParallel(module)
    sharded = FullyShardedDataParallel(nn.Linear(2, 2), process_group=alone, device_id=torch.device("cpu"))
    return {
        "bare": refusal(lambda: attach(module, **there)),
        "half": refusal(lambda: attach(half, **there)),
        "whole": refusal(lambda: attach(whole, replicas=2)),
        "nested": refusal(lambda: attach(nn.Sequential(whole), replicas=2)),
        "flat": refusal(lambda: attach(nn.Sequential(sharded), replicas=2)),
    }


def what_ranks_of_one_job_refuse(rank: int, world_size: int) -> dict[str, str]:
    def try_to(settings: NolocoSettings = SETTINGS, loop: Loop | None = None, **options: Any) -> str:
        model = Loop(rank, 0, None).model if loop is None else loop.model
        return refusal(lambda: attach(model, settings, replicas=world_size, **{"seed": SEED, **options}))

    loop = Loop(rank, 0, None)
    noloco = attach(loop.model, SETTINGS, replicas=world_size, seed=SEED)
    train(loop, noloco, K + 1)
    state = {name: tensor.clone() for name, tensor in noloco.state_dict().items()}
    noloco.close()
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, state)
    later = state | {"local_steps_done": torch.tensor(K + 1 + rank)}
    wider = Loop(rank, 0, None)
    wider.model = nn.Linear(2 + rank, 1)
    return {
        "settings": try_to(paper(local_steps=K, outer_lr=0.7 + 0.25 * rank)),
        "seed": try_to(seed=rank),
        "lengths": try_to(loop=wider),
        "weights": try_to(loop=Loop(rank, 0, None, seed=rank)),
        "no state": try_to(loop=loop, state=None if rank else state),
        "other rank": try_to(loop=loop, state=states[1 - rank]),
        "one not loaded": try_to(loop=None if rank else loop, state=state),
        "other step": try_to(loop=loop, state=later),
        "other run": try_to(loop=loop, state=state | {"first_weights": torch.tensor([rank])}),
        "its own": try_to(loop=loop, state=state),
        "groups of 3": try_to(NolocoSettings(group_size=2 + rank)),
        "one group": try_to(paper(local_steps=K, outer_momentum=0.9)),
    }


def what_changes_after_attach(rank: int, world_size: int) -> dict[str, str]:
    loop = Loop(0, 0, None)
    noloco = attach(loop.model, SETTINGS, replicas=1)
    loaded, before = Loop(0, 0, None, seed=9).module.state_dict(), loop.weights()
    first: Any = {name.removeprefix("0."): one for name, one in loaded.items() if name.startswith("0.")}
    copied = copy.deepcopy(loop.module)
    found = {
        "twice": refusal(lambda: attach(loop.model, SETTINGS, replicas=1)),
        "load": refusal(lambda: loop.module.load_state_dict(loaded)),
        "load a part": refusal(lambda: loop.module.get_submodule("0").load_state_dict(first)),
        "load a copy": refusal(lambda: copied.load_state_dict(loaded)),
    }
    assert torch.equal(loop.weights(), before)
    next(loop.module.parameters()).requires_grad_(False)
    train(loop, noloco, K)  # fewer may be trained: they may be frozen for a while
    loop.module.add_module("more", nn.Linear(1, 1))
    train(loop, noloco, 2 * K - 1)
    found["more"] = refusal(noloco.step)
    found["average"] = refusal(noloco.average)
    noloco.close()
    found |= {"converted": converted(torch.nn.Conv2d(2, 2, 3), memory_format=torch.channels_last)}
    found |= {"of 64 bits": converted(torch.nn.Linear(2, 2), dtype=torch.float64)}
    found |= {"step after": refusal(noloco.step), "average after": refusal(noloco.average)}
    found["load after"] = refusal(lambda: loop.module.load_state_dict(loaded, strict=False))
    found["attach again"] = refusal(lambda: attach(loop.model, SETTINGS, replicas=1))
    return found


def converted(module: nn.Module, **how: Any) -> str:
    noloco = attach(module, SETTINGS, replicas=1)
    module.to(**how)
    noloco.step()
    found = refusal(noloco.step)
    noloco.close(at_once=True)
    return found


def test_an_attached_model_can_be_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a file, and into a process that is spawned; a forkserver pickles likewise."""
    monkeypatch.setattr("megatron_noloco.federation.membership.FIRST_SECONDS", 0.0)
    module = nn.Linear(3, 3)
    noloco = attach(module, SETTINGS, **federation(tmp_path, 0, 2, start_with=1))
    file = io.BytesIO()
    torch.save(module, file)
    assert b"noloco" not in file.getvalue(), "a program without this package can read it"
    file.seek(0)
    torch.load(file, weights_only=False).load_state_dict(module.state_dict())
    child: Any = multiprocessing.get_context("spawn").Process(target=module.eval)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert "the next round would undo it" in refusal(lambda: module.load_state_dict(module.state_dict()))
    noloco.close()


def reads_what_the_other_reads(rank: int, world_size: int) -> list[str]:
    loop = Loop(0, 0, None)
    noloco = attach(loop.model, SETTINGS, replicas=world_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(loop, noloco, 2 * K)
    dist.barrier()
    return [str(one.message) for one in caught if one.filename == __file__]


def test_replicas_that_read_the_same_data_are_warned_once() -> None:
    for (line,) in run_ranks(2, reads_what_the_other_reads):
        assert line.startswith(
            "the replicas had equal weights before their first round: do they all read the same"
        )


def on_its_own(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    attached, plain = Loop(0, 0, None), Loop(0, 0, None)
    noloco = attach(attached.model, SETTINGS, replicas=1)
    found, reports = train(attached, noloco), noloco.average()
    noloco.close()
    expected = []
    for step in range(STEPS):
        plain.step(step)
        expected.append(plain.weights())
    return [*found, attached.weights()], [*expected, expected[-1]], reports


def test_one_replica_has_no_rounds() -> None:
    ((found, expected, reports),) = run_ranks(1, on_its_own)
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert reports == []


class TwoModes(torch.optim.SGD):
    """As schedule-free optimizers."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


TWO_MODES = TwoModes([torch.zeros(2)])
CONVOLUTION: Any = nn.Conv2d(3, 2, 4)
_KEYS = "slow_weights", "local_steps_done", "first_weights", "first_buffers"
SAVED = dict.fromkeys(_KEYS, torch.zeros(2))
ELSEWHERE = FederationSettings(rendezvous="file:///nowhere", key_file="/nowhere/key")
SLOT: dict[str, Any] = {"federation": ELSEWHERE, "slot": 0}


# What is attached in place of a linear model, and how
CALLS: list[tuple[Any, dict[str, Any]]] = [
    (None, {"replicas": 2}),
    (None, {}),
    (None, {"replicas": 2, "settings": {}}),
    (None, {"replicas": 2, "slot": 0}),
    (None, SLOT | {"slot": 4096}),
    (None, SLOT | {"slot": True}),
    (None, SLOT | {"seed": -1}),
    (None, SLOT | {"federation": FederationSettings()}),
    (None, SLOT | {"settings": DELAY_CHOSEN}),
    (None, {"replicas": 2, "stopped": bool}),
    (None, {"replicas": "2"}),
    (None, SLOT | {"stopped": threading.Event()}),
    (None, SLOT | {"inner": TWO_MODES}),
    (None, SLOT | {"state": {}}),
    (None, SLOT | {"state": SAVED}),
    (torch.optim.SGD([torch.zeros(2)]), SLOT),
    (nn.Linear(2, 2).double(), SLOT),
    (CONVOLUTION.to(memory_format=torch.channels_last), SLOT),
]


def test_what_an_attached_model_and_its_ranks_refuse(tmp_path: Path) -> None:
    """In tests/golden/attach_lines.txt. Ranks of a job say the same, and none of them waits for another."""

    def cases() -> Iterator[tuple[str, str]]:
        for number, (model, options) in enumerate(CALLS):
            call = partial(attach, nn.Linear(2, 2) if model is None else model, **options)
            line = re.sub(" at 0x[0-9a-f]+", "", refusal(call))
            yield f"call {number}: {', '.join(options) or 'no options'}", line
        for rank, lines in enumerate(run_ranks(2, what_is_refused, tmp_path)):
            for name, line in lines.items():
                yield f"gradients on rank {rank}: {name}", line
        one, other = run_ranks(2, what_ranks_of_one_job_refuse)
        assert one == other
        for name, line in [*one.items(), *run_ranks(1, what_changes_after_attach)[0].items()]:
            yield name, line

    check("attach_lines", cases())
