"""Local steps of the engine on a simulated GPU: the numbers of a CPU, and how often the host waits for the GPU."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.plans.routing import Routing
from tests.kit.ranks import by_hand, run_ranks
from tests.kit.tiny import BF16, FAMILY_MODELS, RECOMPUTE, build, microbatch, tiny_with
from tests.simulated_gpu import Gpu, Order, Wait, installed
from tests.simulated_gpu.optimizers import TORCH_ADAM, WITH_MUON
from tests.simulated_gpu.process import GpuProcess
from tests.simulated_gpu.streams import CUDA

STEPS, MICROBATCHES, LAYERS = 2, 2, 2
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "Muon": WITH_MUON,
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "recompute": {"model": RECOMPUTE},
    "mixture": {"model": FAMILY_MODELS["mixtral"]},
    "dropout": {"model": DROPOUT},
    "dropout, recompute": {"model": {**DROPOUT, **RECOMPUTE}},
}
BY_HAND: dict[str, dict[str, Any]] = {
    "window": {"model": FAMILY_MODELS["mistral"]},
    "layer norms, biases, no gate": {"model": FAMILY_MODELS["starcoder2"]},
    "YaRN": {"model": FAMILY_MODELS["qwen3 with YaRN"]},
    "z-loss": {"model": {"z_loss_coeff": 1e-3}},
    "ZeRO 2, bf16": {**BF16, "zero_optimization": {"stage": 2}},
}
ALL = CASES | BY_HAND
# Some CPUs have no fp16, and a GPU draws dropout from another generator.
NOT_ON_CPU = ("fp16", "dropout", "dropout, recompute")


def of_all(rank: int, world_size: int, cases: list[str], order: Order | None) -> dict[str, dict[str, Any]]:
    return {name: trained(ALL[name], order) for name in cases}


def trained(changes: dict[str, Any], order: Order | None) -> dict[str, Any]:
    """Return the numbers of local steps on a device, without `order` on a CPU, and the waits of the last one."""
    with nullcontext() if order is None else Gpu(order) as gpu:
        size = {"model": {"num_layers": LAYERS}, "gradient_accumulation_steps": MICROBATCHES}
        config, groups, stage = build(tiny_with(size, TORCH_ADAM, {"scheduler": None}, changes), 1)
        noted: list[tuple[str, Any]] = []
        engine = ReplicaEngine(
            stage, groups, config.as_deepspeed(), lambda name, value, *_: noted.append((name, value))
        )
        routes = Routing(1, config.microbatches, 0, "off").straight()
        losses: list[Any] = []
        for step in range(STEPS):
            if gpu is not None:
                gpu.waits.clear()

            def read(replica: int, index: int, step: int = step) -> Any:
                tokens, labels, _ = microbatch(config, groups, step, replica, index)
                return (
                    (tokens, labels, None)
                    if gpu is None
                    else (tokens.pin_memory(), labels.pin_memory(), None)
                )

            losses += engine.train_batch(read, routes)
        waits = None if gpu is None else Counter(gpu.waits)
        return {
            "losses": torch.tensor([float(loss.loss) for loss in losses]),
            "norms": torch.tensor([float(value) for name, value in noted if name == "train/grad_norm"]),
            "weights": engine.weights.read(),
            "where": {str(one.device) for one in (*stage.parameters(), *engine.weights.parts())},
            "waits": waits,
        }


Results = Callable[[str, Order | None], dict[str, Any]]


@pytest.fixture(scope="module")
def results(gpu_process: GpuProcess) -> Results:
    """Give the numbers of a case on a device; all cases of a device are run in one process."""

    @cache
    def run(order: Order | None, slow: bool) -> dict[str, dict[str, Any]]:
        start = run_ranks if order is None else gpu_process.run_ranks
        cases = [name for name in (BY_HAND if slow else CASES) if order or name not in NOT_ON_CPU]
        (found,) = start(1, of_all, cases, order, timeout=300)
        return cast(dict[str, dict[str, Any]], found)

    return lambda name, order: run(order, name in BY_HAND)[name]


every_case = pytest.mark.parametrize("name", by_hand(ALL, BY_HAND))
NUMBERS = ("losses", "norms", "weights")


@every_case
def test_the_order_of_streams_changes_no_bit(name: str, results: Results) -> None:
    late, at_once = results(name, Order.LATE), results(name, Order.AT_ONCE)
    assert late["where"] == {"cuda:0"}
    for numbers in NUMBERS:
        assert torch.equal(late[numbers], at_once[numbers]), numbers


@pytest.mark.parametrize("name", by_hand([name for name in ALL if "dropout" not in name], BY_HAND))
def test_the_numbers_are_those_of_a_cpu(name: str, results: Results) -> None:
    """A few weights may differ by a whole step: Adam takes one where a gradient is as small as its rounding."""
    found, expected = results(name, Order.LATE), results("fp32" if name == "fp16" else name, None)
    rounding = 1e-2 if "16" in name or name == "Muon" else 1e-4
    for numbers in ("losses", "norms"):
        torch.testing.assert_close(found[numbers], expected[numbers], rtol=rounding, atol=0)
    apart = (found["weights"] - expected["weights"]).norm() / expected["weights"].norm()
    assert apart < rounding


def test_recomputed_layers_draw_the_same_dropout(results: Results) -> None:
    once, again = results("dropout", Order.LATE), results("dropout, recompute", Order.LATE)
    assert not torch.equal(once["losses"], results("fp32", Order.LATE)["losses"])
    for numbers in NUMBERS:
        assert torch.equal(once[numbers], again[numbers]), numbers


def test_rounds_progress_until_the_gpu_has_done_what_is_queued() -> None:
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            torch.cuda.synchronize()
        return looks < 9

    with installed(), Gpu():
        torch.zeros(1, device="cuda")
        engine: Any = SimpleNamespace(_device=CUDA, pipeline=SimpleNamespace(between_microbatches=look))
        ReplicaEngine._progress_while_computing(engine)
    assert looks == 3


# Waits of a local step, by file
MARK = {
    "deepspeed/runtime/utils.py": 2
}  # DeepSpeed's mark for a norm that is not finite: to the device, and back
NORM = {**MARK, "megatron_noloco/engine/gradients.py": 1}
PASSES = LAYERS * MICROBATCHES
WAITS = {
    "bf16": {"deepspeed/runtime/utils.py": 4},  # whether it is finite, and whether it is to be clipped
    "ZeRO 2, bf16": NORM,
    "mixture": {
        **NORM,
        "megatron/core/transformer/moe/token_dispatcher.py": 2 * PASSES,  # counts of tokens, and a mask
        "megatron/core/transformer/moe/moe_utils.py": PASSES,  # a mask
    },
}


@every_case
def test_the_host_waits_for_the_norm_alone(name: str, results: Results) -> None:
    waits: Counter[Wait] = results(name, Order.LATE)["waits"]
    bounds = WAITS.get(name, NORM)
    of_files: Counter[str] = Counter()
    for wait, count in waits.items():
        of_files[wait.file] += count
    more = of_files - Counter(bounds)
    assert not more, [f"{count} x {wait}" for wait, count in waits.items() if wait.file in more]
