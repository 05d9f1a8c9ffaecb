"""How fast a run can compute: the operations of a step, and the peaks of devices."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_noloco.model.architecture import Architecture, Compute
from megatron_noloco.model.families import FAMILIES, families_with, training_flops
from megatron_noloco.model.stage import build_stage
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import build_groups
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.accelerators import find_accelerator
from tests.kit.architectures import SMALL
from tests.kit.ranks import run_ranks

SPARSE = replace(SMALL, family="mixtral", num_moe_experts=5, moe_router_topk=2)


def test_a_step_by_hand() -> None:
    """Every product [m, k] x [k, n] as 2 m k n."""
    queries = 2 * 8 * 16 * 24
    keys = values = 2 * 8 * 16 * 12
    scores = sums = 4 * (2 * 6 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8))  # 4 heads; token t attends to t tokens
    projection = 2 * 8 * 24 * 16
    gate = up = down = 2 * 8 * 16 * 24
    layer = queries + keys + values + scores + sums + projection + gate + up + down
    logits = 2 * 8 * 16 * 32
    assert (layer, logits) == (40320, 8192)
    assert training_flops(SMALL) == 3 * (2 * layer + logits) == 266_496


def test_what_changes_the_operations() -> None:
    """Every difference is that of one forward pass through two layers, three times."""
    tied = replace(SMALL, tied_embeddings=True)
    assert training_flops(tied) == training_flops(SMALL), "a tied output layer multiplies all the same"
    window = replace(SMALL, family="mistral", sliding_window=3)  # 1 + 2 + 6 * 3 pairs instead of 36
    assert training_flops(SMALL) - training_flops(window) == 3 * 2 * (4 * 4 * 6 * (36 - 21))
    wide = replace(window, sliding_window=100)
    assert training_flops(wide) == training_flops(SMALL)
    router, second_mlp = 2 * 8 * 16 * 5, 3 * (2 * 8 * 16 * 24)
    assert training_flops(SPARSE) - training_flops(SMALL) == 3 * 2 * (router + second_mlp)


def counted(rank: int, world_size: int, architecture: Architecture) -> int:
    """Operations of one sample that torch counts, but for the products of attention."""
    cpu.prepare()
    groups = build_groups(Topology(1, 1, 1, 1), False, architecture.tied_embeddings)
    experts = architecture.num_moe_experts is not None
    compute = Compute(moe_router_load_balancing_type="none" if experts else None)
    chunk = build_stage(architecture, compute, groups, seed=1).chunks[0]
    tokens = torch.arange(architecture.seq_length).unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        chunk(tokens, None, None, labels=tokens).sum().backward()
    by_kind = {str(kind): flops for kind, flops in counter.get_flop_counts()["Global"].items()}
    return sum(flops for kind, flops in by_kind.items() if "scaled_dot_product" not in kind)


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_counts_the_same(family: str) -> None:
    """Torch counts what is computed, so it would notice a matrix that the table of a family hides."""
    mixture = family in families_with("num_moe_experts")
    architecture = replace(SPARSE if mixture else SMALL, family=family)
    attention = 3 * 2 * (4 * 4 * 6 * 36)
    (found,) = run_ranks(1, counted, architecture)
    assert found == training_flops(architecture) - attention


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("a100", 312),
        ("NVIDIA A10", None),
        ("NVIDIA H20", None),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_the_peak_of_a_device(device: str, peak: float | None) -> None:
    found = find_accelerator(device)
    assert [found and found.peak(precision) for precision in ("bf16", "fp16", "fp32")] == [peak, peak, None]
