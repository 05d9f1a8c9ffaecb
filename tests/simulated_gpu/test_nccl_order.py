"""The ranks of each layout ask NCCL for their messages in an order in which all of them end."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_noloco.config import RunConfig
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.model.stage import build_stage
from megatron_noloco.pipeline.groups import build_groups
from tests.kit.ranks import by_hand, run_ranks
from tests.kit.saved_runs import EXPERTS, Changes, layout, ranks
from tests.kit.tiny import BF16, TIED, VOCABULARY, tiny_with
from tests.simulated_gpu.gpu import Gpu
from tests.simulated_gpu.nccl_order import Communicator, Kernel, Op, OrderError, Program, play, record
from tests.simulated_gpu.optimizers import TORCH_ADAM, WITH_MUON
from tests.simulated_gpu.process import GpuProcess
from tests.simulated_gpu.streams import Order

STEPS = 2
SMALL = {**TORCH_ADAM, "model": {"num_layers": 2, "seq_length": 8}, "noloco": {"routing": "microbatch"}}
FOUR_LAYERS = {"model": {"num_layers": 4}}
ZERO_2 = {"zero_optimization": {"stage": 2}}

# name: changes of the tiny config; the last one is its layout
LAYOUTS: dict[str, list[Changes]] = {
    "one rank": [layout(replicas=1)],
    "two stages of three replicas, tied": [TIED, layout(pp=2, replicas=3)],
    "two stages of two chunks": [FOUR_LAYERS, layout(pp=2, vpp=2)],
    "tp 2 with sequence parallelism": [layout(tp=2, replicas=1, sequence_parallel=True)],
    "dp 2, ZeRO 2": [ZERO_2, layout(dp=2, replicas=1)],
    "ep 2, bf16": [BF16, EXPERTS, layout(dp=2, replicas=1, ep=2)],
}
BY_HAND: dict[str, list[Changes]] = {
    "two stages": [layout(pp=2)],
    "four stages": [FOUR_LAYERS, layout(pp=4, replicas=2)],
    "three uneven stages, tied": [
        FOUR_LAYERS,
        TIED,
        layout(pp=3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1),
    ],
    "two stages of two chunks, tp 2": [FOUR_LAYERS, layout(pp=2, vpp=2, tp=2)],
    "two stages, tp 2 x dp 2, Muon": [WITH_MUON, layout(pp=2, tp=2, dp=2, replicas=1)],
    "two stages, tp 2 x dp 2, tied, bf16": [BF16, TIED, layout(pp=2, tp=2, dp=2)],
    "two stages, tp 2, ep 2": [EXPERTS, layout(pp=2, tp=2, dp=2, ep=2, sequence_parallel=True)],
}
ALL = LAYOUTS | BY_HAND
every_layout = pytest.mark.parametrize("name", by_hand(ALL, BY_HAND))


def local_steps(program: Program, raw: dict[str, Any], world_size: int) -> None:
    """Train and evaluate; all numbers that arrive are zeros."""
    with Gpu(Order.AT_ONCE):
        config = RunConfig(**raw)
        topology, architecture = config.topology(world_size), config.architecture(VOCABULARY)
        routing = config.routing(topology)
        groups = build_groups(topology, routing.active, tied=architecture.tied_embeddings)
        program.start_ends()
        stage = build_stage(architecture, config.compute, groups, config.training.seed)
        engine = ReplicaEngine(stage, groups, config.as_deepspeed())
        tokens = torch.zeros(config.micro_batch_size, architecture.seq_length, dtype=torch.int64)
        for step in range(STEPS):
            engine.train_batch(lambda *_: (tokens, tokens, None), routing.routes(step, step))
        engine.evaluate(lambda *_: (tokens, tokens, None), routing.straight(), config.microbatches)


def recorded(rank: int, world_size: int, function: Callable[..., None], *args: Any) -> Program:
    dist.barrier()  # before any rank leaves the world of the harness
    dist.destroy_process_group()
    return record(rank, world_size, function, *args)


@pytest.fixture(scope="module")
def programs(gpu_process: GpuProcess) -> Callable[[str], list[Program]]:
    """Give the programs of all ranks of a layout."""

    @cache
    def of(name: str) -> list[Program]:
        raw, count = tiny_with(SMALL, *ALL[name]), ranks(ALL[name][-1])
        programs: list[Program] = gpu_process.run_ranks(count, recorded, local_steps, raw, count, timeout=300)
        return programs

    return of


@every_layout
def test_all_ranks_end(name: str, programs: Callable[[str], list[Program]]) -> None:
    of_all = programs(name)
    total = sum(len(program.kernels) for program in of_all)
    assert play(of_all) == total
    assert play(of_all, strict=True) == total


@every_layout
def test_every_group_is_connected_at_the_start(name: str, programs: Callable[[str], list[Program]]) -> None:
    for program in programs(name):
        assert not program.connected_late()


@every_layout
def test_a_rank_has_one_communicator_of_its_own(name: str, programs: Callable[[str], list[Program]]) -> None:
    for program in programs(name):
        assert len(program.connected_alone()) <= 1


# The replay itself

FIRST, SECOND = (Communicator((0, 1), number, "nccl") for number in (0, 1))
SUM = Op("allreduce", None, (4,))


def program(rank: int, *calls: tuple[Communicator, list[Op]], waits: bool = True) -> Program:
    """A program whose calls are each waited for before the next, or none of them is."""
    kernels = [
        Kernel(communicator, ops, frozenset() if waits else frozenset(range(number)))
        for number, (communicator, ops) in enumerate(calls)
    ]
    return Program(rank, kernels)


def to(peer: int, kind: str, *content: int) -> Op:
    return Op(kind, peer, content)


def crossed(waits: bool) -> list[Program]:
    return [
        program(0, (FIRST, [SUM]), (SECOND, [SUM]), waits=waits),
        program(1, (SECOND, [SUM]), (FIRST, [SUM]), waits=waits),
    ]


def exchange(batched: bool) -> list[Program]:
    """Both ranks send before they receive, in one call or in two."""
    programs = []
    for rank in (0, 1):
        ops = [to(1 - rank, "send", 4), to(1 - rank, "recv", 4)]
        programs.append(program(rank, *([(FIRST, ops)] if batched else [(FIRST, [one]) for one in ops])))
    return programs


def test_a_replay_ends_where_nccl_would() -> None:
    assert play(exchange(batched=True), strict=True) == 2
    assert play(crossed(waits=False)) == 4


@pytest.mark.parametrize(
    ("programs", "strict"),
    [
        pytest.param(crossed(waits=True), False, id="two groups in two orders"),
        pytest.param(crossed(waits=False), True, id="the same, without waiting, while NCCL connects"),
        pytest.param(exchange(batched=False), False, id="both send first"),
        pytest.param([program(0, (FIRST, [SUM])), program(1)], False, id="left out"),
        pytest.param(
            [program(0, (FIRST, [SUM])), program(1, (FIRST, [SUM._replace(content=(5,))]))],
            False,
            id="shapes",
        ),
        pytest.param(
            [program(0, (FIRST, [to(1, "send", 4)])), program(1, (FIRST, [to(0, "recv", 5)]))],
            False,
            id="shapes of a message",
        ),
    ],
)
def test_a_replay_that_does_not_end_is_an_error(programs: list[Program], strict: bool) -> None:
    with pytest.raises(OrderError):
        play(programs, strict)


def ask(program: Program) -> None:
    """Each rank swaps two vectors with the next but one, and sums one of them up."""
    pair = dist.new_group([0, 1])
    program.start_ends()
    mine, theirs, peer = torch.ones(3), torch.ones(3), 1 - program.rank
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)])
    dist.all_reduce(mine, group=pair)
    work[0].wait()
    assert theirs.tolist() == [0, 0, 0]
    dist.all_reduce(theirs)


def test_a_program_has_what_a_rank_asked_for() -> None:
    everybody, pair = (Communicator((0, 1), number, "gloo") for number in (0, 1))
    vector = (torch.float32, 3)
    programs = run_ranks(2, recorded, ask)
    for rank, program in enumerate(programs):
        swap = [Op("send", 1 - rank, vector), Op("recv", 1 - rank, vector)]
        assert program.kernels == [
            Kernel(everybody, swap, frozenset()),
            Kernel(pair, [Op("allreduce", None, vector)], frozenset({0})),
            Kernel(everybody, [Op("allreduce", None, vector)], frozenset()),
        ]
    assert play(programs) == play(programs, strict=True) == 6
