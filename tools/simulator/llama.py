"""The Llama of the trainer for R replicas at once: every weight is a stack, shape [R, ...].

The names and shapes are those of the family's table (`megatron_noloco.model.families`), so initial weights are the
trainer's. All replicas are computed together by batched matrix products; their losses do not mix, so one backward
pass of the sum of the losses gives every replica its own gradient.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import Parameter
from megatron_noloco.model.parameters import initial_weights


class StackedLlama:
    """Computes losses from a matrix of weights, shape [R, elements]: row r is replica r's, flat.

    Args:
        parameters: the rows of the family's table, in the order of the vector.

    Raises ValueError for what this model does not have: other families, scaled frequencies, tied embeddings.
    """

    def __init__(self, architecture: Architecture, parameters: Sequence[Parameter]) -> None:
        if architecture.tied_embeddings:
            raise ValueError("model.untie_embeddings_and_output_weights must be true here")
        if architecture.family != "llama":
            raise ValueError(f'model.family "{architecture.family}" is not simulated, only "llama"')
        for name in ("rope_scaling_factor", "yarn_rotary_scaling_factor"):
            if getattr(architecture, name) is not None:
                raise ValueError(f"model.{name} is not simulated")
        self.architecture = architecture
        self.parameters = parameters
        self.sizes = [math.prod(parameter.shape) for parameter in self.parameters]
        half = architecture.kv_channels // 2
        frequencies = architecture.rotary_base ** (-torch.arange(half) / half)
        angles = torch.arange(architecture.seq_length)[:, None] * frequencies
        self._cos, self._sin = angles.cos(), angles.sin()  # [seq_length, head / 2]

    def initial(self, seed: int) -> Tensor:
        """Return the weights that every replica starts from, fp32, shape [elements]."""
        read = initial_weights(self.architecture, seed)
        return torch.cat([read(parameter.name).flatten() for parameter in self.parameters])

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """Return views of the weights [R, elements] by name, each of shape [R, *shape]."""
        parts = weights.split(self.sizes, dim=1)
        return {
            parameter.name: part.unflatten(1, parameter.shape)
            for parameter, part in zip(self.parameters, parts, strict=True)
        }

    def matrices(self) -> Iterator[Tensor]:
        """Return the places of each layer matrix's elements in a row of the weights, int64, [rows, columns].

        Queries, keys, values, gate and up are matrices of their own.
        """
        places = self.named(torch.arange(sum(self.sizes))[None])
        for parameter in self.parameters:
            if parameter.linear:
                yield from parameter.split(places[parameter.name][0])

    def of_each(self, value: Callable[[Parameter], float]) -> Tensor:
        """Return a number for each weight, computed from its parameter; fp32, shape [elements]."""
        rows = zip(self.parameters, self.sizes, strict=True)
        return torch.cat([torch.full((size,), float(value(row))) for row, size in rows])

    def losses(self, weights: Tensor, samples: Tensor) -> Tensor:
        """Return the mean loss per token of each replica, shape [R].

        Args:
            weights: shape [R, elements].
            samples: token ids of each replica's samples, int64, shape [R, B, seq_length + 1].
        """
        a, w = self.architecture, self.named(weights)
        tokens, labels = samples[..., :-1], samples[..., 1:]
        replicas = len(tokens)
        embedding = w["embedding.word_embeddings.weight"]
        rows = torch.arange(replicas)[:, None, None] * a.padded_vocab_size + tokens
        hidden = F.embedding(rows.flatten(1), embedding.flatten(0, 1))  # [R, B * seq_length, hidden]
        for layer in range(a.num_layers):
            at = f"decoder.layers.{layer}."
            normed = self._norm(hidden, w[at + "input_layernorm.weight"])
            mixed = self._attend(_linear(normed, w[at + "self_attention.linear_qkv.weight"]), tokens.shape)
            hidden = hidden + _linear(mixed, w[at + "self_attention.linear_proj.weight"])
            normed = self._norm(hidden, w[at + "pre_mlp_layernorm.weight"])
            gate, up = _linear(normed, w[at + "mlp.linear_fc1.weight"]).chunk(2, dim=-1)
            hidden = hidden + _linear(F.silu(gate) * up, w[at + "mlp.linear_fc2.weight"])
        hidden = self._norm(hidden, w["decoder.final_layernorm.weight"])
        logits = _linear(hidden, w["output_layer.weight"][:, : a.vocab_size])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return loss.view(replicas, -1).mean(dim=1)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], eps=self.architecture.norm_epsilon) * weight[:, None]

    def _attend(self, qkv: Tensor, shape: torch.Size) -> Tensor:
        """qkv [R, B * seq_length, rows of linear_qkv] -> [R, B * seq_length, heads * channels]."""
        a = self.architecture
        groups, per_group = a.num_query_groups, a.num_attention_heads // a.num_query_groups
        grouped = qkv.view(-1, shape[-1], groups, per_group + 2, a.kv_channels)
        query, key, value = grouped.split([per_group, 1, 1], dim=3)
        query, key = (self._rotate(part.flatten(2, 3).transpose(1, 2)) for part in (query, key))
        value = value.flatten(2, 3).transpose(1, 2)  # [R * B, heads, seq_length, channels]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=per_group > 1)
        return mixed.transpose(1, 2).reshape(*qkv.shape[:2], -1)

    def _rotate(self, heads: Tensor) -> Tensor:
        """Apply rotary embedding to [..., seq_length, channels]; channel i is paired with i + channels / 2."""
        first, second = heads.chunk(2, dim=-1)
        return torch.cat(
            [first * self._cos - second * self._sin, second * self._cos + first * self._sin], dim=-1
        )


def _linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """[R, N, in] and [R, out, in] -> [R, N, out]."""
    return torch.bmm(inputs, weight.transpose(1, 2))
