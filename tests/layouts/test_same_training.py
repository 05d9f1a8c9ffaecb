"""One table: a feature on a layout trains as on one rank, and as without it where it should change nothing.

A feature that a layout or another feature could break gets a row. The parts of `slow` rows are in other rows.
"""

from collections import Counter, defaultdict
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_noloco.config import RunConfig
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.model.families import Table, table_of
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import parameters_of_stages
from tests.kit.ranks import run_ranks
from tests.kit.tiny import (
    FAMILY_MODELS,
    MIXTURES,
    MUON,
    MUON_ROUNDING,
    VOCABULARY,
    sizes,
    tiny_with,
    train,
)

STEPS = 5


def recompute(granularity: str, **settings: Any) -> dict[str, Any]:
    return {"model": {"recompute_granularity": granularity, **settings}}


FULL = {"recompute_method": "uniform", "recompute_num_layers": 1}
# Where sums in another order are seen in the weights, without Adam's steps along gradients that are all rounding
SGD = {
    "scheduler": None,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0, **dict.fromkeys(("betas", "eps", "weight_decay"))}},
}
MUON_PARAMS = {"momentum": 0.9, "betas": [0.8, 0.95]}
FEATURES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD": SGD,
    "Muon": {"optimizer": {"type": "Muon", "params": MUON["optimizer"]["params"] | MUON_PARAMS}},
    "standard Newton-Schulz": {"optimizer": {"params": {"ns_method": "standard"}}},
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "bf16": {"bf16": {"enabled": True}},
    "sums in bf16": {"data_types": {"grad_accum_dtype": "bf16"}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
    "tied": {"model": {"untie_embeddings_and_output_weights": False}},
    "full": recompute("full", **FULL),
    "full by block": recompute("full", **FULL | {"recompute_method": "block"}),
    "selective": recompute("selective"),
    "some modules": recompute("selective", recompute_modules=["core_attn", "mlp"]),
    "dropout": {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.2}},
    "z-loss": {"model": {"z_loss_coeff": 1.0}},
    "wide": {"model": {"init_method_std": 0.2}},
    "one layer": {"model": {"num_layers": 1}},
    "two layers": {"model": {"num_layers": 2, "init_method_std": 0.1}},
    **{name: {"model": model} for name, model in FAMILY_MODELS.items()},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": sizes(),
    "TP2": sizes(tp=2),
    "TP2, sequence": sizes(tp=2, sequence_parallel=True),
    "PP2": sizes(pp=2),
    "TP2 x PP2": sizes(tp=2, pp=2),
    "TP2 x PP2, sequence": sizes(tp=2, pp=2, sequence_parallel=True),
    "PP2 x VP2": sizes(pp=2, vpp=2),
    "PP2 of 1 and 3 layers": sizes(pp=2, num_layers_in_first_pipeline_stage=1),
    "DP2": sizes(dp=2),
    "DP2 x PP2": sizes(dp=2, pp=2),
    "DP4": sizes(dp=4),
    "DP4, EP2": sizes(dp=4, ep=2),
    "DP2, EP2 x TP2": sizes(dp=2, ep=2, tp=2, sequence_parallel=True),
    "DP2, EP2 x PP2": sizes(dp=2, ep=2, pp=2),
}
FEW = 1e-4 * MUON_ROUNDING  # of Muon, which rounds coarser
COARSE = 0.03  # of bf16 and fp16, whose weights take steps that are larger than a movement of theirs


class Row(NamedTuple):
    """A run, and the run on one rank that it equals."""

    features: str
    layout: str
    like: str | None = None  # features of the other run; None: the same
    losses: float = (
        1e-5  # the largest difference of losses, and as a part of norms and, tenfold, of movements
    )
    slow: bool = False


def of_families(layout: str, quick: tuple[str, ...]) -> list[Row]:
    """Who has which gradient differs: biases, norms of heads, experts, which need sequence parallelism with TP."""
    rows = []
    for name, model in FAMILY_MODELS.items():
        own = "TP2, sequence" if layout == "TP2" and model["family"] in MIXTURES else layout
        rows.append(Row(name, own, slow=name not in quick))
    return rows


ROWS = [
    # Layouts
    Row("AdamW", "TP2 x PP2", slow=True),
    Row("AdamW", "TP2 x PP2, sequence"),
    Row("AdamW", "PP2 x VP2"),
    Row("AdamW", "PP2 of 1 and 3 layers"),
    Row("AdamW", "DP2 x PP2"),
    Row("ZeRO 2", "DP2", "AdamW"),
    Row("ZeRO 2 + tied + full", "DP2", "tied"),
    Row("wide + z-loss", "TP2 x PP2", losses=1e-4),
    *of_families("PP2", ()),
    *of_families("TP2", ("qwen2", "starcoder2")),
    *of_families("TP2 x PP2, sequence", ("qwen3", "qwen3_moe", "starcoder2")),
    # Experts, on any number of data-parallel ranks
    Row("SGD + mixtral + two layers + ZeRO 2", "DP4, EP2", "SGD + mixtral + two layers"),
    Row("SGD + mixtral + two layers", "DP2, EP2 x TP2"),
    Row("SGD + mixtral + two layers + bf16", "DP4, EP2", losses=COARSE),
    Row("SGD + mixtral + two layers + bf16", "DP2, EP2 x TP2", losses=COARSE, slow=True),
    Row("Muon + mixtral + two layers", "DP2, EP2 x PP2", losses=FEW),
    Row("Muon + mixtral + two layers", "DP4, EP2", losses=FEW, slow=True),
    # Muon; with four dp ranks a partition is smaller than some matrices
    Row("Muon", "TP2 x PP2", losses=FEW, slow=True),
    Row("Muon", "TP2 x PP2, sequence", losses=FEW),
    Row("Muon", "PP2 x VP2", losses=FEW, slow=True),
    Row("Muon", "PP2 of 1 and 3 layers", losses=FEW, slow=True),
    Row("Muon", "DP2 x PP2", losses=FEW),
    Row("Muon + ZeRO 2", "DP2", "Muon", losses=FEW),
    Row("Muon + one layer", "DP4", losses=FEW),
    Row("Muon + tied", "PP2", losses=FEW),
    Row("Muon + standard Newton-Schulz", "one rank", "Muon", losses=0.05),
    # Half precision: DeepSpeed has an optimizer for each way to add up gradients
    Row("bf16", "one rank", "AdamW", losses=COARSE),
    Row("bf16", "DP2 x PP2", losses=COARSE),
    Row("bf16", "TP2, sequence", losses=COARSE),
    Row("bf16", "TP2 x PP2, sequence", losses=COARSE, slow=True),
    Row("bf16 + ZeRO 2", "DP2", "bf16", losses=COARSE, slow=True),
    Row("bf16 + tied", "PP2", "tied", losses=COARSE),
    Row("Muon + bf16 + ZeRO 2 + sums in bf16", "DP2", "Muon", losses=0.05),
    Row("Muon + bf16", "TP2 x PP2, sequence", "Muon", losses=0.05, slow=True),
    Row("Muon + bf16", "DP2 x PP2", "Muon", losses=0.05, slow=True),
    Row("Muon + bf16 + sums in bf16", "DP2 x PP2", "Muon", losses=0.05, slow=True),
    Row("fp16", "one rank", "AdamW", losses=COARSE),
    Row("Muon + fp16", "one rank", "Muon", losses=0.05),
    # Recomputed activations change nothing, and draw the same dropout again
    *(Row(how, "one rank", "AdamW", losses=0) for how in ("full", "full by block", "selective", "some modules")),
    Row("dropout + full", "one rank", "dropout", losses=0),
]  # fmt: skip
# What would compare nothing if it were off, and what it is added to
CHANGES = {
    "bf16": "AdamW",
    "tied": "AdamW",
    "dropout": "AdamW",
    "wide + z-loss": "wide",
    "Muon + standard Newton-Schulz": "Muon",
}
# How often a layer, its attention and its MLP compute in each microbatch; of four layers a block of one does again
ONCE = (1, 1, 1)
COMPUTED = {
    "full": (2, 2, 2),
    "full by block": (1.25,) * 3,
    "selective": (1, 2, 1),
    "some modules": (1, 2, 2),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NO_FP16 = not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def config(features: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """A config file's content; every data-parallel size has the same batch."""
    layout = {"parallel": parallel, "gradient_accumulation_steps": 4 // parallel.get("data_parallel_size", 1)}
    return tiny_with(*(FEATURES[name] for name in features.split(" + ")), layout)


def table(raw: dict[str, Any]) -> Table:
    return table_of(RunConfig(**raw).architecture(VOCABULARY))


def watched(rank: int, world_size: int, raw: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train, and count what shows that a feature was on.

    Adds how often layers, attentions and MLPs computed in each microbatch, and how many parameters still had a
    gradient of their own after a microbatch of which ZeRO 2 keeps this rank's part.
    """
    computed, left, modules = Counter[str](), set[int](), Counter[str]()
    build, reduce_one = ReplicaEngine.__init__, ReplicaEngine._reduce_one

    def built(engine: ReplicaEngine, stage: Any, *arguments: Any) -> None:
        build(engine, stage, *arguments)
        for layer in (layer for chunk in stage.chunks for layer in chunk.decoder.layers):
            parts = {"layer": layer, "attention": layer.self_attention.core_attention, "mlp": layer.mlp}
            modules.update(list(parts))
            for name, part in parts.items():
                part.register_forward_pre_hook(partial(lambda name, *_: computed.update([name]), name))

    def reduced(engine: ReplicaEngine) -> None:
        reduce_one(engine)
        left.add(sum(parameter.grad is not None for parameter in engine.stage.parameters()))

    ReplicaEngine.__init__, ReplicaEngine._reduce_one = built, reduced  # type: ignore[method-assign]
    found = train(rank, world_size, raw, steps)
    microbatches = RunConfig(**raw).microbatches
    times = tuple(computed[name] / modules[name] / microbatches / steps for name in modules)
    return found | {"computed": times, "left": left, "microbatches": microbatches}


@cache
def on_one_rank(features: str) -> dict[str, Any]:
    (found,) = run_ranks(1, watched, config(features, {}), STEPS)
    assert_on([found], features)
    return found


def assert_on(ranks: list[dict[str, Any]], features: str) -> None:
    """The ranks recomputed, divided and rounded what the features say, and nothing else."""
    names = features.split(" + ")
    dtype = next((DTYPES[name] for name in names if name in DTYPES), torch.float32)
    for rank in ranks:
        assert rank["computed"] == next((COMPUTED[name] for name in names if name in COMPUTED), ONCE)
        assert {weight.dtype for weight in rank["weights"].values()} == {dtype}
        if "ZeRO 2" in names:
            assert rank["left"] == ({0} if rank["microbatches"] > 1 else set()), "each rank keeps its part"
        elif dtype == torch.float32:
            assert 0 not in rank["left"]


def losses(ranks: list[dict[str, Any]]) -> Tensor:
    """The replica's loss at each step: the mean over the microbatches of all its dp ranks."""
    seen = torch.tensor([rank["losses"] for rank in ranks if rank["losses"][0]], dtype=torch.float64)
    return seen.mean(dim=(0, 2))


def grad_norms(ranks: list[dict[str, Any]]) -> Tensor:
    norms = torch.tensor([rank["grad_norms"] for rank in ranks], dtype=torch.float64)
    torch.testing.assert_close(norms, norms[:1].expand_as(norms), rtol=1e-6, atol=0)
    return norms[0]


def assert_slices(
    found: list[dict[str, Any]], whole: dict[str, Any], rows: Table, topology: Topology, row: Row
) -> None:
    """All ranks begin with slices of the whole model, and end with them; all copies of a weight stay one."""
    copies: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    for rank, one in enumerate(found):
        tp = topology.position(rank).tp
        for name, weight in one["weights"].items():
            of = rows.find(name)  # the last stage's copy of a tied embedding has the output layer's name
            copies[of.source, 0 if of.tp_dim is None else tp].append(weight)
            begun, start = one["start"][name], whole["start"][of.source]
            assert torch.equal(begun, of.slice(start, tp, topology.tp).to(begun.dtype)), (rank, name)
            if row.losses < COARSE or of.decays:  # a norm's weight is near 1, where bf16 has large steps
                end = whole["weights"][of.source]
                error = (weight - of.slice(end, tp, topology.tp)).norm() / (end - start).norm()
                assert error <= 10 * row.losses, (rank, name)
    assert {source for source, _ in copies} == {rows.find(name).source for name in whole["weights"]}
    for place, held in copies.items():
        assert all(torch.equal(held[0], other) for other in held), f"copies of {place}"


def assert_planned(found: list[dict[str, Any]], raw: dict[str, Any], topology: Topology) -> None:
    """What `plan` counts is what the ranks have."""
    run = RunConfig(**raw)
    for stage, planned in enumerate(parameters_of_stages(run, run.architecture(VOCABULARY), topology)):
        for rank, one in enumerate(found):
            if topology.position(rank).stage == stage:
                assert planned.parameters == sum(part.numel() for part in one["weights"].values())
                assert planned.owned == len(one["master"])


def assert_divided(found: list[dict[str, Any]], rows: Table, topology: Topology) -> None:
    """In fp32 master weights are the weights, each on one of the ranks that have it; beside them is padding."""
    master = torch.cat([rank["master"] for rank in found])
    once = [
        weight.flatten()
        for rank, one in enumerate(found)
        for name, weight in one["weights"].items()
        if topology.owners(dp := topology.position(rank).dp, rows.find(name).expert is not None)[0] == dp
    ]
    padding = master.new_zeros(len(master) - sum(map(len, once)))
    assert torch.equal(master.sort().values, torch.cat([*once, padding]).sort().values)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.features}, {row.layout}", marks=[pytest.mark.slow] * row.slow)
        for row in ROWS
    ],
)
def test_a_feature_trains_alike_on_a_layout(row: Row) -> None:
    if NO_FP16 and "fp16" in row.features:
        pytest.skip("this CPU has no fp16 arithmetic")
    raw, whole = config(row.features, LAYOUTS[row.layout]), on_one_rank(row.like or row.features)
    block = RunConfig(**raw).parallel
    ranks = block.pipeline_model_parallel_size * block.data_parallel_size * block.tensor_model_parallel_size
    topology = RunConfig(**raw).topology(ranks)
    found = run_ranks(ranks, watched, raw, STEPS)
    assert_on(found, row.features)
    expected = losses([whole])
    assert expected[-1] < expected[0] - 0.3, "a run that does not learn compares nothing"
    torch.testing.assert_close(losses(found), expected, rtol=0, atol=row.losses)
    torch.testing.assert_close(grad_norms(found), grad_norms([whole]), rtol=row.losses, atol=0)
    assert_slices(found, whole, table(raw), topology, row)
    assert_planned(found, raw, topology)
    if "16" not in row.features:
        assert_divided(found, table(raw), topology)
    if not row.losses:
        assert torch.equal(found[0]["master"], whole["master"])


@pytest.mark.parametrize("features", CHANGES)
def test_a_feature_changes_the_training(features: str) -> None:
    found, plain = on_one_rank(features), on_one_rank(CHANGES[features])
    norms = grad_norms([found]) / grad_norms([plain]) - 1
    assert max((losses([found]) - losses([plain])).abs().max(), norms.abs().max()) > 1e-4
