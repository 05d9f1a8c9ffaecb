"""The banner: what a run will do, in numbers that a person can check before the first step."""

from typing import Any

from megatron_noloco.config import Known, RunConfig, describe
from megatron_noloco.model.families import table_of
from tests.kit.configs import FEDERATION, edited
from tests.kit.golden import check

COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
WSD = {"total_num_steps": "auto", "decay_num_steps": 4, "warmup_num_steps": 1, "decay_type": "1-sqrt"}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}
TWO_RATES = {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-4}}}


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": {"warmup_num_steps": 2, **params}}}


# Of each layer 64 x 64 for q, k, v and the projection, 128 x 64 for gate, up and down; embedding, output, norms.
LINEAR, OTHERS = 4 * (4 * 64 * 64 + 3 * 128 * 64), 2 * 256 * 64 + 9 * 64
# Of 30 replicas: groups of 2, 3, 5; then of 3, 5, 2; then of 5, 2, 3.
CYCLES = {"noloco.pairing": "cycle", "noloco.group_size": 5, "parallel.replicas": 30}

CASES: list[dict[str, Any]] = [
    {},
    {"parallel.replicas": 1},
    CYCLES,
    CYCLES | {"noloco.fragments": 2},
    CYCLES | {"noloco.fragments": 3},
    {"parallel.replicas": 16, "noloco.sites": 2, "noloco.pairing": "auto"},
    {"parallel.pipeline_model_parallel_size": 1},
    # 0.5^(1 / 100) forgets half in 100 local steps, of 256 tokens each.
    {"optimizer.params.betas": [0.9, 0.5**0.01]},
    MUON,
    {"scheduler": COSINE},
    {"scheduler": {"type": "WSD", "params": WSD}},
    # the rates, in the first of 10 local steps, at the peak, in the last
    TWO_RATES,
    schedule("WarmupDecayLR", total_num_steps="auto") | {"optimizer.params.lr": 1e-5},
    TWO_RATES | schedule("WarmupDecayLR", total_num_steps=10),
    TWO_RATES | schedule("WarmupLR"),
    schedule("WSD", total_num_steps=10, decay_num_steps=4),
    schedule("WarmupLR", warmup_max_lr=2e-4),
    {"scheduler": {"type": "WarmupLR"}},
    schedule("WarmupCosineLR", total_num_steps=20),
    schedule("WarmupCosineLR", total_num_steps=5, cos_min_ratio=0.1),
    schedule("WarmupDecayLR", warmup_num_steps=9, total_num_steps=9),
    schedule("WarmupDecayLR", total_num_steps=1_000_000) | {"training.train_iters": 3_000_000},
    {"noloco.fragments": 2},
    {"checkpoint.save_interval": 50},
    {"checkpoint.save_interval": 0},
    {"noloco.overlap_steps": 1},
    {"noloco.overlap_steps": "auto"},
    {"noloco.outer_momentum": 0, "noloco.outer_lr": 1},
    {"noloco.local_steps": "auto", "noloco.routing": "microbatch"},
    FEDERATION,
]


def banner(edits: dict[str, Any]) -> str:
    run = RunConfig(**edited(edits))
    assert run.world_size is not None
    known = Known(run, run.topology(run.world_size, slot=3), run.architecture(256))
    return "\n".join([*describe(known), ""])


def test_the_banner() -> None:
    """The first whole, of the others the lines that differ from it."""
    first = banner({}).splitlines()
    said = (
        [line for line in banner(edits).splitlines() if not edits or line not in first] for edits in CASES
    )
    check("banner", zip(CASES, map("\n".join, said), strict=True))


def test_the_banner_leaves_out_what_is_not_done() -> None:
    assert "fragments" not in banner({})
    without_rounds = banner({"noloco.enabled": False, "noloco.overlap_steps": "auto"})
    assert "overlap" not in without_rounds
    assert "outer state" not in without_rounds


def test_the_parameters_of_the_banner_are_those_of_the_model() -> None:
    assert table_of(RunConfig(**edited({})).architecture(256)).parameter_count == LINEAR + OTHERS
