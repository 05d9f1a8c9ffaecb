"""The smallest runs that still have every part: shared by the integration tests, which fork after importing it."""

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported: else it guesses, and says so

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype
from torch import Tensor

from megatron_noloco.config import RunConfig, load_config
from megatron_noloco.data.blend import Blend
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.huggingface.weight_files import PretrainedWeights
from megatron_noloco.model.families import families_with
from megatron_noloco.model.stage import Stage, build_stage
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import Groups, build_groups
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.sample_order import BatchPlan, Order
from megatron_noloco.training import start as start_module
from megatron_noloco.training.prepare import read_data
from megatron_noloco.training.run import Run
from megatron_noloco.training.start import start

cpu.prepare()

VOCABULARY = ByteTokenizer.vocab_size
TINY: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {
            "total_num_steps": 20,
            "warmup_num_steps": 2,
            "warmup_min_ratio": 0.5,
            "warmup_type": "linear",
            "cos_min_ratio": 0.1,
        },
    },
    "gradient_clipping": 0.5,
    "noloco": {"recipe": "paper", "local_steps": 2, "final_average": False, "routing": "round"},
    "parallel": {},
    "model": {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "seq_length": 16,
        "make_vocab_size_divisible_by": 32,
    },
    "data": {"text": "somewhere", "split": "9,1,0"},
    "training": {"train_iters": 6, "log_interval": 1},
    "evaluation": {"iters": 0},
    "tensorboard": {"enabled": False},
}

# The block `model` of each family, with what makes it another one.
FAMILY_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama 3.1": {"family": "llama", "rotary_base": 5e5, "rope_scaling_factor": 8.0},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "kv_channels": 12},
    "qwen3 with YaRN": {
        "family": "qwen3",
        "yarn_rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 64,
    },
    "mistral": {"family": "mistral", "sliding_window": 5},
    "mixtral": {"family": "mixtral", "num_moe_experts": 4, "moe_aux_loss_coeff": 0.1},
    "qwen3_moe": {
        "family": "qwen3_moe",
        "kv_channels": 12,
        "num_moe_experts": 6,
        "moe_router_topk": 3,
        "moe_aux_loss_coeff": 0.1,
    },
    "starcoder2": {"family": "starcoder2", "sliding_window": 5},
}
MIXTURES = families_with("num_moe_experts")
# Of models that transformers makes, in its words; the vocabulary is each test's own.
HF_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
# Changes of the tiny config
BF16 = {"bf16": {"enabled": True}}
TIED = {"model": {"untie_embeddings_and_output_weights": False}}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": None, "muon_lr": 0.02, "adam_lr": 0.01}}}
# How much coarser than fp32 its rounding is: DeepSpeed's kernel takes fp16 where a CPU has it.
MUON_ROUNDING = 1 if ns_compute_dtype("gram") == torch.float32 else 100


_SIZES = {
    "pp": "pipeline_model_parallel_size",
    "tp": "tensor_model_parallel_size",
    "dp": "data_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


def sizes(**given: Any) -> dict[str, Any]:
    """The block `parallel`, in which pp, tp, dp, vpp and ep are short for the sizes."""
    return {_SIZES.get(name, name): value for name, value in given.items()}


def tiny(changes: Mapping[str, Any] | None = None, base: Mapping[str, Any] = TINY) -> dict[str, Any]:
    """A config file's content: the tiny one with `changes`, block by block. A key changed to None goes."""
    merged = dict(base)
    for key, value in (changes or {}).items():
        old = merged.get(key)
        merged[key] = tiny(value, old) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return {key: value for key, value in merged.items() if value is not None}


def tiny_with(*changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tiny one with several changes, each of what those before it have made."""
    return reduce(lambda raw, change: tiny(change, raw), changes, tiny())


def write_text(folder: Path, characters: int = 20_000) -> str:
    """A text file without order, about half a thousand samples of the tiny model."""
    letters = torch.randint(97, 123, (characters,), generator=torch.Generator().manual_seed(0))
    path = folder / "text.txt"
    path.write_bytes(bytes(letters.tolist()))
    return str(path)


def build(raw: dict[str, Any], world_size: int) -> tuple[RunConfig, Groups, Stage]:
    """This rank's stage, without an engine."""
    config = RunConfig(**raw)
    topology = config.topology(world_size)
    architecture = config.architecture(VOCABULARY)
    groups = build_groups(topology, routed=False, tied=architecture.tied_embeddings)
    pretrained = config.training.pretrained
    with PretrainedWeights(Path(pretrained), architecture) if pretrained else nullcontext() as read:
        return config, groups, build_stage(architecture, config.compute, groups, config.training.seed, read)


def microbatch(
    config: RunConfig, groups: Groups, step: int, replica: int, index: int
) -> tuple[Tensor, Tensor, None]:
    """Counting modulo 40 from random numbers, which depend on the samples' places alone, not on dp."""
    topology = groups.topology
    plan = BatchPlan(topology.replicas, topology.dp, config.microbatches, config.micro_batch_size)
    place = plan.first(step, replica, groups.position.dp, index)
    starts = torch.randint(
        0, 40, (config.micro_batch_size, 1), generator=torch.Generator().manual_seed(place)
    )
    samples = (starts + torch.arange(config.model.seq_length + 1)) % 40
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous(), None


class Recorded(defaultdict[str, list[float]]):
    """A `Record`: everything that was recorded, by name, in order."""

    def __init__(self) -> None:
        super().__init__(list)

    def __call__(self, name: str, value: Any, weight: float = 1.0) -> None:
        self[name].append(float(value))


def train(rank: int, world_size: int, raw: dict[str, Any], steps: int) -> dict[str, Any]:
    """Local steps of every replica, without rounds; what this rank saw, picklable."""
    config, groups, stage = build(raw, world_size)
    recorded, start = Recorded(), weights_of(stage)
    engine = ReplicaEngine(stage, groups, config.as_deepspeed(), recorded)
    routes = Routing(groups.topology.replicas, config.microbatches, 0, "off").straight()
    losses = [
        engine.train_batch(
            lambda replica, index, step=step: microbatch(config, groups, step, replica, index), routes
        )
        for step in range(steps)
    ]
    return {
        "losses": [[float(loss.loss) for loss in of_step] for of_step in losses],
        "grad_norms": recorded["train/grad_norm"],
        "learning_rates": recorded["train/learning_rate"],
        "balance": sum(recorded["train/load_balancing_loss"]),  # this rank's share
        "start": start,
        "weights": weights_of(stage),
        "master": engine.weights.read(),
    }


def weights_of(stage: Stage) -> dict[str, Tensor]:
    """This rank's part of every weight, by the name it has in the unsplit model."""
    return {row.name: parameter.detach().clone() for row, parameter in stage.named_rows()}


def initial_weights(rank: int, world_size: int, raw: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's part of every weight, before the first step."""
    _, _, stage = build(raw, world_size)
    return weights_of(stage)


def at_steps(
    before: Callable[[int], object] = lambda done: None,
    after: Callable[[ReplicaEngine], object] = lambda engine: None,
) -> None:
    """Call a function before each local step, with the number of steps done, and one after it, with the engine."""
    original = ReplicaEngine.train_batch

    def train_batch(engine: ReplicaEngine, *arguments: Any) -> Any:
        before(engine._deepspeed.global_steps)
        found = original(engine, *arguments)
        after(engine)
        return found

    ReplicaEngine.train_batch = train_batch  # type: ignore[method-assign]


def write_config(folder: Path, raw: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return str(path)


def already_joined() -> None:
    """On a rank of the harness: the world that `train` would join is there."""
    dist.init_process_group = lambda *_, **__: None


def build_run(config: str) -> Run:
    """What the command `train` builds from a file, before the first step."""
    return start(load_config(config), os.environ, progress="lines")


def trained(config: str) -> Run:
    """A run from a file, after its last step."""
    run = build_run(config)
    assert run.train()
    return run


def run_whole(rank: int, world_size: int, config: str) -> dict[str, Any]:
    """A run on a rank of the harness; weights at the end."""
    already_joined()
    run = trained(config)
    dist.barrier()
    return {
        "master": run.engine.weights.read(),
        "slow": run.peers.outer.state()["slow_weights"].clone(),
        "momentum": run.peers.outer.state().get("outer_momentum"),
    }


@dataclass(frozen=True)
class SlotOrders:
    """The order in which one job reads what the replicas of a federation read, each in an order of its own."""

    orders: list[Order]
    batch: int  # samples of a replica in a local step

    def ids(self, first: int, count: int) -> np.ndarray:
        places = np.arange(first, first + count)
        steps, within = np.divmod(places, len(self.orders) * self.batch)
        slots, samples = np.divmod(within, self.batch)
        found = zip(slots, steps * self.batch + samples, strict=True)
        return np.concatenate([self.orders[slot].ids(int(place), 1) for slot, place in found])


class SlotBlend(Blend):
    """The training data of a job whose replicas read as the slots of a federation do."""

    replicas, batch = 1, 1

    def order(self, seed: int, slot: int | None = None) -> Any:
        assert slot is None
        orders = [super(SlotBlend, self).order(seed, replica) for replica in range(self.replicas)]
        return SlotOrders(orders, self.batch)


def run_as_slots(rank: int, world_size: int, config: str) -> dict[str, Any]:
    """Do as `run_whole` with the samples that the replicas of a federation would read."""
    already_joined()

    def read(run: RunConfig, topology: Any, *rest: Any) -> Any:
        data, validation = read_data(run, topology, *rest)
        training = SlotBlend(data.training.parts, data.training.weights)
        training.replicas, training.batch = topology.replicas, run.replica_batch
        return replace(data, training=training), validation

    start_module.read_data = read
    trained(config)
    dist.barrier()
    return {}


def metrics(output_dir: Path, kind: str = "step") -> list[list[dict[str, Any]]]:
    """What the replicas wrote about their steps (or evaluations), replica by replica, but when they wrote it."""
    files = sorted(output_dir.glob("replica_*/metrics.jsonl"))
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    for row in itertools.chain(*rows):
        del row["unix_seconds"]
    return [[row for row in one if row["kind"] == kind] for one in rows]
