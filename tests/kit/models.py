"""Models that were trained, exported and imported, and what they compute."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_noloco.checkpoint.checkpointer import Checkpointer
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.model.stage import Stage
from megatron_noloco.outer import NoRounds
from megatron_noloco.pipeline.groups import Groups
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.sample_order import BatchPlan
from megatron_noloco.plans.topology import Position
from megatron_noloco.training.start import checkpoint_settings
from tests.kit.ranks import call, run_command, run_ranks
from tests.kit.tiny import (
    build,
    microbatch,
    tiny,
    weights_of,
    write_config,
)

TOKENS = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(1))


def save(
    rank: int, world_size: int, raw: dict[str, Any], steps: int, losses: Sequence[float | None] = ()
) -> dict[str, Any]:
    """Local steps and a checkpoint; what the trainer's own model says about TOKENS, and this rank's weights."""
    config, groups, stage = build(raw, world_size)
    engine = ReplicaEngine(stage, groups, config.as_deepspeed())
    topology, at = groups.topology, groups.position
    routes = Routing(topology.replicas, config.microbatches, 0, "off").straight()
    for step in range(steps):
        engine.train_batch(
            lambda replica, index, step=step: microbatch(config, groups, step, replica, index), routes
        )
    counters = {}
    if losses and (loss := losses[at.replica]) is not None:
        counters = {"validation_loss": loss, "mean_model_loss": 1.25, "evaluated_step": steps}
    plan = BatchPlan(topology.replicas, topology.dp, config.microbatches, config.micro_batch_size)
    checkpointer = Checkpointer(
        checkpoint_settings(config, groups.topology), engine, NoRounds(engine.weights), plan
    )
    report = checkpointer.save(steps, counters)
    assert report.error is None
    checkpointer.close()
    weights = weights_of(stage)
    return {"logits": logits(stage.float().eval(), groups), "weights": weights}


@torch.no_grad()
def logits(stage: Stage, groups: Groups) -> Tensor | None:
    """Of the last stage, in fp32: hidden states go from chunk to chunk by hand, without reading a checkpoint."""
    topology, at = groups.topology, groups.position
    chunks, found = len(stage.chunks), None
    for index in range(chunks):
        for step in range(topology.pp):
            if step != at.stage:
                continue
            chunk: Any = stage.chunks[index]
            if not chunk.pre_process:
                slices = topology.tp if topology.sequence_parallel else 1
                hidden = torch.empty(TOKENS.size(1) // slices, TOKENS.size(0), stage.config.hidden_size)
                dist.recv(hidden, neighbour(groups, -1))
                chunk.set_input_tensor(hidden)
            result = chunk(TOKENS, None, None)
            if chunk.post_process:
                parts = [torch.empty_like(result) for _ in range(topology.tp)]
                dist.all_gather(parts, result.contiguous(), group=groups.tp)
                found = torch.cat(parts, dim=-1)[..., : ByteTokenizer.vocab_size]
            else:
                dist.send(result.contiguous(), neighbour(groups, 1))
    dist.barrier()
    return found


def neighbour(groups: Groups, step: int) -> int:
    topology, at = groups.topology, groups.position
    stage = (at.stage + step) % topology.pp
    return topology.rank(Position(at.replica, stage, at.dp, at.tp))


def load(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@torch.no_grad()
def logits_there(folder: Path) -> Tensor:
    """Under transformers, in a process of its own: in the one that forks, torch's threads would make it hang."""

    def forward(rank: int, world_size: int) -> Tensor:
        return AutoModelForCausalLM.from_pretrained(folder).float().eval()(TOKENS).logits.clone()

    return run_ranks(1, forward)[0]


def exported(folder: Path, output: Path, *options: str) -> tuple[dict[str, Tensor], str]:
    code, out, err = call("export", str(folder), "--output", str(output), *options)
    assert code == 0, err
    return load(output), out


def imported(folder: Path, llama_folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    template = write_config(folder, tiny({**changes, "model": {"make_vocab_size_divisible_by": None}}))
    config = folder / "imported.json"
    run_command("import", str(llama_folder), "--config", template, "--output", str(config))
    return json.loads(config.read_text())
