"""The banner: what a run will do, in numbers that a person can check before the first step."""

from typing import Any

import pytest

from megatron_noloco.config import RunConfig, describe
from megatron_noloco.model.families import table_of
from tests.unit.configs import FEDERATION, edited

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
MERGED = "overlap: training goes on during an exchange; a round is merged "

BANNER: list[tuple[dict[str, Any], str]] = [
    ({"parallel.replicas": 1}, "beta = 0.7; 1 replica, which takes outer steps without a partner\n"),
    (CYCLES, "cycles of 2 x 3 x 5\n"),
    (CYCLES, "(rho = 0.595, "),
    (CYCLES | {"noloco.fragments": 2}, "(rho = 0.595, "),
    (CYCLES | {"noloco.fragments": 3}, "(rho = 0.602, "),
    (
        {"parallel.replicas": 16, "noloco.sites": 2, "noloco.pairing": "auto"},
        "cycles of 2 x 2 x 2 inside each of 2 sites, and between them in one of 8 rounds\n",
    ),
    ({"parallel.pipeline_model_parallel_size": 1}, "routing: round, without effect (1 stage)"),
    # 0.5^(1 / 100) forgets half in 100 local steps, of 256 tokens each.
    ({"optimizer.params.betas": [0.9, 0.5**0.01]}, "half-life of the second moment 100.0 local steps,"),
    (MUON, f"Muon for {LINEAR:,} weights of linear maps in layers, AdamW for {OTHERS:,}, muon_lr 0.01"),
    ({"scheduler": COSINE}, "schedule: WarmupCosineLR, total_num_steps 10, warmup_num_steps 2"),
    ({"scheduler": {"type": "WSD", "params": WSD}}, "schedule: WSD, 1 local steps of warm-up, 5 stable, 4"),
    # the rates, in the first of 10 local steps, at the peak, in the last
    (TWO_RATES, "rates: muon_lr 0.02 and adam_lr 0.0003 in every local step\n"),
    (
        schedule("WarmupDecayLR", total_num_steps="auto") | {"optimizer.params.lr": 1e-5},
        "rates: lr 0 in the first local step, lr 1e-05 at the peak (local step 3), lr 2.5e-06 in the last\n",
    ),
    (
        TWO_RATES | schedule("WarmupDecayLR", total_num_steps=10),
        "adam_lr 0.0003 at the peak (local step 3), muon_lr 0.005 and adam_lr 7.5e-05 in the last\n",
    ),
    (TWO_RATES | schedule("WarmupLR"), "muon_lr 0.02 and adam_lr 0.0003 in the last\n"),
    (
        schedule("WSD", total_num_steps=10, decay_num_steps=4),
        "rates: lr 0.0005 in the first local step, lr 0.001 at the peak (local step 2), lr 0.00025 in the last\n",
    ),
    (
        schedule("WarmupLR", warmup_max_lr=2e-4),
        "in the last\nrates: scheduler.params.warmup_max_lr 0.0002 holds, not optimizer.params.lr 0.001\n",
    ),
    (
        {"scheduler": {"type": "WarmupLR"}},
        "the run of 10 local steps ends in the warm-up of 1,000 (DeepSpeed",
    ),
    (
        schedule("WarmupCosineLR", total_num_steps=20),
        "rates: the run ends before the schedule does: training.",
    ),
    (
        schedule("WarmupCosineLR", total_num_steps=5, cos_min_ratio=0.1),
        "rates: lr 0.0001 from local step 6 on: scheduler.params.total_num_steps 5 is less than",
    ),
    (
        schedule("WarmupDecayLR", total_num_steps=1_000_000) | {"training.train_iters": 3_000_000},
        "training.train_iters 3,000,000; the last 1,999,999 local steps would change no weight\n",
    ),
    (
        {"noloco.fragments": 2},
        "2, each 1/2 of a rank's weights and exchanged once in 5 local steps; one every 2.5",
    ),
    (
        {"checkpoint.save_interval": 50},
        "checkpoints: every 50 local steps and at the end; the last 2 are kept",
    ),
    ({"checkpoint.save_interval": 0}, "checkpoints: at the end, and when the run is stopped"),
    ({"noloco.fragments": 2}, "outer state: 12 bytes per parameter ("),
    ({"noloco.overlap_steps": 1}, MERGED + "1 local step after it began"),
    ({"noloco.overlap_steps": "auto"}, MERGED + "as many local steps after it began as hide the exchanges"),
    (
        {"noloco.local_steps": "auto", "noloco.routing": "microbatch"},
        "method: noloco in fp32, k = 1 at first, then as many as keep waiting below 10 %, alpha = 0.5",
    ),
    (FEDERATION, "federation: this job is replica 3; exchanges in the open"),
]


def banner(edits: dict[str, Any]) -> str:
    run = RunConfig(**edited(edits))
    assert run.world_size is not None
    return "\n".join([*describe(run, run.topology(run.world_size, slot=3), run.architecture(256)), ""])


WHOLE = """\
parallel: 4 replicas x pipeline 2 x data 1 x tensor 1 = 8 ranks
batch per replica: 4 per microbatch x 2 microbatches x 1 data-parallel = 8 samples; x 32 = 256 tokens \
per local step
batch in total: 4 replicas x 8 = 32 samples; x 32 = 1,024 tokens per local step
method: noloco in fp32, k = 5, alpha = 0.5, beta = 0.7, gamma = 0.7, n = 2
routing: reshuffled every round
optimizer: AdamW, lr 0.001, weight_decay 0
schedule: none, the learning rate stays
rates: lr 0.001 in every local step
precision: fp32, ZeRO stage 1 over the data-parallel ranks of a replica
spread: without local steps, 3.9 rounds would halve the standard deviation of the weights over the replicas \
(rho = 0.700, explained in docs/method.md)
overlap: none, training waits for every exchange
outer state: 16 bytes per parameter (slow weights 4, outer momentum 4, combined vector 4, received vector 4)
checkpoints: every 30 minutes and at the end; the last 2 are kept
parameters: 197,184 (padded vocabulary 256)
"""


def test_the_whole_banner() -> None:
    assert banner({}) == WHOLE


@pytest.mark.parametrize(("edits", "part"), BANNER)
def test_the_banner_says(edits: dict[str, Any], part: str) -> None:
    assert part in banner(edits)


@pytest.mark.parametrize(("overlap_steps", "state"), [(0, 16), (1, 20), ("auto", 20)])
def test_the_banner_says_what_overlap_costs(overlap_steps: int | str, state: int) -> None:
    overlap = {"noloco.overlap_steps": overlap_steps}
    text = banner(overlap)
    assert f"outer state: {state} bytes per parameter (slow weights 4, outer momentum 4, combined" in text
    averages = {"noloco.outer_momentum": 0, "noloco.outer_lr": 1}
    assert f"outer state: {state - 4} bytes per parameter (slow weights 4, combined" in banner(
        overlap | averages
    )


def test_the_banner_leaves_out_what_is_not_done() -> None:
    assert "fragments" not in banner({})
    without_rounds = banner({"noloco.enabled": False, "noloco.overlap_steps": "auto"})
    assert "overlap" not in without_rounds
    assert "outer state" not in without_rounds


def test_the_parameters_of_the_banner_are_those_of_the_model() -> None:
    assert table_of(RunConfig(**edited({})).architecture(256)).parameter_count == LINEAR + OTHERS
