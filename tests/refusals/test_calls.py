"""What a call in Python is told that cannot be: tests/golden/calls.txt has the line of each."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from megatron_noloco.config import RunConfig
from megatron_noloco.config.parallel_block import layers_of_chunks
from megatron_noloco.engine.schedules import WSD
from megatron_noloco.federation.movement import alone
from megatron_noloco.job.launcher import World, local_device, master_port, read_world
from megatron_noloco.job.world import choose_transport
from megatron_noloco.model.architecture import PipelineSplit
from megatron_noloco.model.families import Parameter, Rows
from megatron_noloco.outer import Exchange, TorchWeights
from megatron_noloco.outer.payload import Codec
from megatron_noloco.outer.round import cut
from megatron_noloco.plans.grouping import Grouping
from megatron_noloco.plans.sample_order import Order
from megatron_noloco.plans.topology import Place, Topology
from megatron_noloco.settings import FederationSettings, NolocoSettings, grouping_of
from tests.kit.configs import FEDERATION, config, edited
from tests.kit.fleet import fleet_of
from tests.kit.golden import check, refusals
from tests.kit.loopback import loopback_world

TORCH = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}
HYDRA = {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8"}
SRUN = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}
# Variables of launchers that contradict each other
ENVIRONS: list[Mapping[str, str]] = [
    TORCH | {"WORLD_SIZE": "4"},
    TORCH | {"LOCAL_RANK": "9"},
    {"RANK": "0", "LOCAL_RANK": "0"},
    TORCH | {"RANK": "-1"},
    OPEN_MPI | {"RANK": "0"},
    HYDRA | {"WORLD_SIZE": "4"},
    SRUN | {"LOCAL_RANK": "0"},
    {"PMI_RANK": "0", "PMI_SIZE": "2"},
]
# Layers that do not divide, among stages and chunks
SPLITS: list[tuple[PipelineSplit, tuple[int, ...]]] = [
    (PipelineSplit(num_layers_in_first_pipeline_stage=1), (8, 3)),
    (PipelineSplit(account_for_loss_in_pipeline_split=True), (8, 2)),
    (PipelineSplit(2, 2), (5, 2)),
    (PipelineSplit(num_layers_in_last_pipeline_stage=3), (7, 3, 2)),
    (PipelineSplit(account_for_embedding_in_pipeline_split=True), (1, 2)),
    (PipelineSplit(2, account_for_loss_in_pipeline_split=True), (8, 2)),
    (PipelineSplit(2), (8, 1)),
]


def world_of(launcher: Any) -> World:
    return World(rank=5, local_rank=2, world_size=8, launcher=launcher)


def in_words(split: PipelineSplit, sizes: tuple[int, ...]) -> str:
    given = [f"{name} {value}" for name, value in asdict(split).items() if value]
    return f"{', '.join(given)}: {' x '.join(map(str, sizes))}"


def ranks(edits: dict[str, Any], count: int) -> Topology:
    return RunConfig(**edited(edits)).topology(count)


CALLS: dict[str, Callable[[], object]] = {
    # topology and plans
    "dp 0": lambda: Topology(dp=0),
    "dp 3, ep 2": lambda: Topology(dp=3, ep=2),
    "slot -1": lambda: Topology(slot=-1, separate_jobs=True),
    "replica 4 of 4": lambda: Place(4, 4),
    "rank 3 of replica 0, which has 2": lambda: Place(0, 2, rank=3, ranks_per_replica=2),
    "the position of rank 4 of 4": lambda: Topology(replicas=4).position(4),
    "no seed": lambda: Grouping(6, 2, None),  # type: ignore[arg-type]
    "seed -1": lambda: Grouping(6, 2, -1),
    "an order of no samples": lambda: Order.of(0, seed=0),
    # groups and weights
    "groups of 7 among 6": lambda: grouping_of(NolocoSettings(group_size=7), 6, seed=7),
    "sites that only train knows": lambda: grouping_of(NolocoSettings(sites="hosts"), 4, seed=1),
    "a site with a space": lambda: FederationSettings(site="a b"),
    "sites in random pairs": lambda: NolocoSettings(sites=2, pairing="random"),
    "4 fragments of 3 weights": lambda: cut(3, [], 4),
    "11 fragments of 10 weights": lambda: alone(10, 11),
    "weights on two devices": lambda: TorchWeights([torch.ones(2), torch.ones(2, device="meta")]),
    "channel 99": lambda: Exchange(loopback_world(1)[0], Place(0, 1), 99),
    "the place of another rank": lambda: Exchange(loopback_world(2)[1], Place(0, 2), 0),
    "local step 0": lambda: fleet_of(1, 1).outer[0].after_local_step(0),
    "2 bits": lambda: Codec(2),
    "47 of 48 rows": lambda: Parameter("mlp.linear_fc1.weight", (48, 16), rows=Rows((24, 23))),
    "a schedule that is too long": lambda: WSD(10, warmup_num_steps=6, decay_num_steps=5),
    # launchers
    **{f"{dict(environ)}": lambda environ=environ: read_world(environ) for environ in ENVIRONS},  # type: ignore[misc]
    **{
        f"port {text!r}": lambda text=text: master_port({"MASTER_PORT": text})  # type: ignore[misc]
        for text in ("abc", "-1", "65536", "")
    },
    **{
        f"MPI under {launcher}": lambda launcher=launcher: choose_transport("mpi", world_of(launcher))  # type: ignore[misc]
        for launcher in ("torchrun", "deepspeed", "environment")
    },
    "a third rank of two GPUs": lambda: local_device(world_of("srun"), 2),
    # configs that do not fit the ranks or the tokenizer
    "8 ranks for 3 replicas of 2": lambda: ranks({"parallel.replicas": 3}, 8),
    "1 rank for 3 replicas of 2": lambda: ranks({"parallel.replicas": 3}, 1),
    "7 ranks for replicas of 2": lambda: ranks({"parallel.replicas": "auto"}, 7),
    "4 ranks for a job of 2": lambda: ranks(FEDERATION, 4),
    "a vocabulary of 100": lambda: config(model__vocab_size=100).architecture(257),
    "no vocabulary": lambda: config().architecture(),
    "a vocabulary of 258 for 4 ranks": lambda: config(
        parallel__tensor_model_parallel_size=4, model__make_vocab_size_divisible_by=3
    ).architecture(257),
    **{
        in_words(split, sizes): lambda split=split, sizes=sizes: layers_of_chunks(split, *sizes)
        for split, sizes in SPLITS
    },  # type: ignore[misc]
}


def test_each_is_one_line() -> None:
    check("calls", refusals(CALLS, ValueError))
