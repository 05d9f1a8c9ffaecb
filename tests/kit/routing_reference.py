"""Replicas with different weights, as real ranks and as whole models in one process, on the same made-up data."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from megatron_noloco.config import RunConfig
from megatron_noloco.data.samples import IGNORED
from megatron_noloco.model.families import Parameter, table_of
from megatron_noloco.model.stage import Stage, build_stage
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import Groups, build_groups
from megatron_noloco.pipeline.pipeline import MicrobatchLoss
from megatron_noloco.plans.routing import Routes, Routing
from megatron_noloco.plans.topology import Position, Topology
from tests.kit.tiny import FAMILY_MODELS

BASE_SEED = 100  # of the weights; replica i is drawn from BASE_SEED + i
VOCABULARY = 32
SEQ_LENGTH = 16
INITIAL_STD = 0.2  # large enough for every layer to matter
ROUTING_SEED = 7

Gradients = dict[str, Tensor]  # by the parameter's name in the unsplit model


class Case(NamedTuple):
    """What is run; everything else about it is fixed."""

    replicas: int
    pp: int
    microbatches: int
    tp: int = 1
    vpp: int = 1
    layers_per_chunk: int = 1
    micro_batch_size: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    tied: bool = False
    family: str = "llama"  # a key of FAMILY_MODELS
    documents: bool = False  # several in each sample, told apart

    @property
    def topology(self) -> Topology:
        return Topology(self.replicas, self.pp, 1, self.tp, self.vpp, self.sequence_parallel)

    @property
    def chunks(self) -> int:
        """Model chunks of a replica: the units that a route leads through."""
        return self.pp * self.vpp

    @property
    def name(self) -> str:
        extras = [f"tp{self.tp}"] if self.tp > 1 else []
        extras += [f"vp{self.vpp}"] if self.vpp > 1 else []
        extras += [f"{self.layers_per_chunk}layers"] if self.layers_per_chunk > 1 else []
        extras += ["sequence_parallel"] if self.sequence_parallel else []
        extras += ["recompute"] if self.recompute else []
        extras += ["tied"] if self.tied else []
        extras += [self.family] if self.family != "llama" else []
        extras += ["documents"] if self.documents else []
        return "-".join([f"{self.replicas}x{self.pp}x{self.microbatches}", *extras])

    def unsplit(self) -> "Case":
        """The same model, whole, in one process."""
        layers = self.chunks * self.layers_per_chunk
        return self._replace(replicas=1, pp=1, tp=1, vpp=1, layers_per_chunk=layers, sequence_parallel=False)

    def config(self, **changes: Any) -> RunConfig:
        model: dict[str, Any] = {
            "num_layers": self.chunks * self.layers_per_chunk,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "seq_length": SEQ_LENGTH,
            "make_vocab_size_divisible_by": VOCABULARY,
            "untie_embeddings_and_output_weights": not self.tied,
            "init_method_std": INITIAL_STD,
            **FAMILY_MODELS[self.family],
        }
        if self.recompute:
            model |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        return RunConfig(
            **{
                "train_micro_batch_size_per_gpu": self.micro_batch_size,
                "gradient_accumulation_steps": self.microbatches,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "gradient_clipping": 1.0,
                "parallel": {
                    "replicas": self.replicas,
                    "pipeline_model_parallel_size": self.pp,
                    "tensor_model_parallel_size": self.tp,
                    "virtual_pipeline_model_parallel_size": self.vpp,
                    "sequence_parallel": self.sequence_parallel,
                },
                "model": model,
                "data": {"text": "python-stdlib", "reset_attention_mask": self.documents},
                "training": {"train_iters": 1},
                "noloco": {"enabled": False},
                **changes,
            }
        )


def read(replica: int, microbatch: int, case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, labels and, in a case with documents, these, that no other replica or microbatch has.

    The token after the end of a document has then no loss.
    """
    generator = torch.Generator().manual_seed(1000 * replica + microbatch)
    text = torch.randint(VOCABULARY, (case.micro_batch_size, SEQ_LENGTH + 1), generator=generator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if not case.documents:
        return tokens, labels, None
    ends = torch.rand(tokens.shape, generator=generator) < 0.25
    return tokens, labels.masked_fill(ends, IGNORED), ends.cumsum(1) - ends.long()


def crossing_routes(case: Case, interval: str) -> Routes:
    """Routes of the first step in which a microbatch leaves its replica (of step 0 when none ever can)."""
    routing = Routing(case.replicas, case.microbatches, ROUTING_SEED, interval)  # type: ignore[arg-type]
    for step in range(20):
        routes = routing.routes(step, round_index=step)
        if any(
            path(routes, case, 0, microbatch) != [0] * case.chunks for microbatch in range(case.microbatches)
        ):
            return routes
    assert interval == "off" or case.replicas == 1
    return routing.routes(0, 0)


def path(routes: Routes, case: Case, origin: int, microbatch: int) -> list[int]:
    """The replica that each model chunk of the way belongs to."""
    replicas = [origin]
    for boundary in range(case.chunks - 1):
        replicas.append(routes.next_replica(boundary, replicas[-1], microbatch))
    return replicas


def build_own_stage(case: Case, routed: bool = True, **changes: Any) -> tuple[RunConfig, Groups, Stage]:
    """This rank's stage, with the weights of its replica."""
    cpu.prepare()
    config = case.config(**changes)
    groups = build_groups(case.topology, routed, case.tied)
    architecture = config.architecture(VOCABULARY)
    stage = build_stage(architecture, config.compute, groups, BASE_SEED + groups.position.replica)
    spread_norms(stage, groups.position.replica)
    return config, groups, stage


@torch.no_grad()
def spread_norms(stage: Stage, replica: int) -> None:
    """Norms start as ones everywhere; afterwards no two replicas have the same."""
    for row, parameter in stage.named_rows():
        if row.init == "ones":
            parameter.add_(0.1 * (replica + 1) * torch.linspace(-1, 1, parameter.numel()))


def named_parameters(stage: Stage) -> dict[str, nn.Parameter]:
    """This rank's part, by the names of the unsplit model."""
    return {row.name: parameter for row, parameter in stage.named_rows()}


def named_gradients(stage: Stage) -> Gradients:
    return {name: gradient_of(parameter) for name, parameter in named_parameters(stage).items()}


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """A copy, since the next batch adds to the original."""
    assert parameter.grad is not None
    return parameter.grad.clone()


def expected_part(full: Gradients, name: str, position: Position, case: Case) -> Tensor:
    """What a rank should find for one of its parameters."""
    return row_of(case, name).slice(full[name], position.tp, case.tp)


def row_of(case: Case, name: str) -> Parameter:
    return table_of(case.config().architecture(VOCABULARY)).find(name)


class Expected(NamedTuple):
    gradients: list[Gradients]  # by replica, of its whole model
    losses: dict[tuple[int, int], float]  # by (origin, microbatch)


def reference(rank: int, world_size: int, case: Case, routes_of: dict[str, Routes]) -> dict[str, Expected]:
    """In one process: whole models, of which every microbatch uses the layers that its route names."""
    models = _whole_models(case)
    return {name: _expected(case, models, routes) for name, routes in routes_of.items()}


def reference_step(
    rank: int, world_size: int, case: Case, routes: Routes, learning_rate: float, clip: float
) -> tuple[list[Gradients], list[float]]:
    """Weights of the whole models after one step of SGD along clipped gradients; and the norms of those."""
    models = _whole_models(case)
    gradients = _expected(case, models, routes).gradients
    norms = [norm(of_model) for of_model in gradients]
    moved = [
        {
            name: parameter.detach() - learning_rate * min(1.0, clip / (length + 1e-6)) * of_model[name]
            for name, parameter in model.named_parameters()
        }
        for model, of_model, length in zip(models, gradients, norms, strict=True)
    ]
    return moved, norms


def norm(gradients: Gradients) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def _whole_models(case: Case) -> list[Any]:
    unsplit = case.unsplit()
    config = unsplit.config()
    architecture = config.architecture(VOCABULARY)
    cpu.prepare()
    groups = build_groups(unsplit.topology, routed=False)
    models = []
    for replica in range(case.replicas):
        stage = build_stage(architecture, config.compute, groups, BASE_SEED + replica)
        spread_norms(stage, replica)
        models.append(stage.chunks[0])
    return models


def _expected(case: Case, models: list[Any], routes: Routes) -> Expected:
    for model in models:
        model.zero_grad()
    losses = {}
    for microbatch in range(case.microbatches):
        for origin in range(case.replicas):
            way = [models[replica] for replica in path(routes, case, origin, microbatch)]
            tokens, labels, documents = read(origin, microbatch, case)
            pieces = [(tokens, labels)] if documents is None else list(_alone(tokens, labels, documents))
            losses_of_pieces = [
                F.cross_entropy(_logits(way, case, piece).flatten(0, 1), wanted.flatten(), reduction="sum")
                for piece, wanted in pieces
            ]
            loss = torch.stack(losses_of_pieces).sum() / (labels != IGNORED).sum()
            # What core's schedules do, so that the loss that balances experts is scaled like the other.
            MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / case.microbatches)
            (loss / case.microbatches).backward()
            losses[origin, microbatch] = float(loss)
    gradients = [
        {name: gradient_of(parameter) for name, parameter in model.named_parameters()} for model in models
    ]
    return Expected(gradients, losses)


def _alone(tokens: Tensor, labels: Tensor, documents: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every document by itself, as a batch of one."""
    for sample in range(len(tokens)):
        for number in documents[sample].unique():
            of_document = documents[sample] == number
            yield tokens[sample][of_document][None], labels[sample][of_document][None]


def _logits(way: list[Any], case: Case, tokens: Tensor) -> Tensor:
    """[batch, tokens, vocabulary]. `way` names the model whose layers serve as each chunk of the route."""
    hidden = way[0].embedding(input_ids=tokens, position_ids=None)
    for chunk, model in enumerate(way):
        rotation = model.rotary_pos_emb(tokens.size(1))
        for layer in _layers(model, chunk, case.layers_per_chunk):
            hidden, _ = layer(hidden, attention_mask=None, rotary_pos_emb=rotation)
    hidden = way[-1].decoder.final_layernorm(hidden)
    output = way[-1].shared_embedding_or_output_weight() if case.tied else way[-1].output_layer.weight
    return F.linear(hidden, output).transpose(0, 1)


def _layers(model: Any, chunk: int, count: int) -> Iterator[nn.Module]:
    return iter(model.decoder.layers[chunk * count : (chunk + 1) * count])


class Observed(NamedTuple):
    position: Position
    gradients: Gradients
    losses: list[tuple[int, float]]  # (origin, loss) by microbatch; empty but on the last stage


def observed(stage: Stage, groups: Groups, losses: list[MicrobatchLoss]) -> Observed:
    """What this rank hands to the test; the barrier keeps it from leaving while others still need it."""
    dist.barrier()
    return Observed(
        groups.position, named_gradients(stage), [(one.origin, float(one.loss)) for one in losses]
    )
