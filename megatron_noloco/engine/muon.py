"""Implements Muon on the flat partitions of ZeRO, with DeepSpeed's Newton-Schulz kernels."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.muon.original_muon import (
    zeropower_via_gram_newtonschulz,
    zeropower_via_newtonschulz5,
)
from torch import Tensor, nn

from megatron_noloco.model.families import Parameter
from megatron_noloco.outer.vectors import number_tensor
from megatron_noloco.pipeline.groups import Groups, ProcessGroup

_NEWTON_SCHULZ = {"gram": zeropower_via_gram_newtonschulz, "standard": zeropower_via_newtonschulz5}
_NEWTON_SCHULZ_STEPS = 5  # DeepSpeed's and Jordan's


class _Matrices(NamedTuple):
    """Describes the parameters that ZeRO puts into one flat vector."""

    rows: list[Parameter]
    ranges: list[tuple[int, int]]  # first and last + 1 element of each
    owners: ProcessGroup  # the data-parallel ranks that divide the vector

    @classmethod
    def of(cls, rows: list[Parameter], tp_size: int, owners: ProcessGroup) -> "_Matrices":
        sizes = (math.prod(row.slice_shape(tp_size)) for row in rows)
        return cls(rows, list(pairwise(accumulate(sizes, initial=0))), owners)


class Muon(torch.optim.AdamW):
    """Runs Muon for the linear maps of the layers, AdamW for all other weights of a stage.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), in DeepSpeed's form. For the
    gradient G of a matrix W [rows, columns], with its momentum buffer M, learning rate lr and momentum mu:

        M <- mu M + (1 - mu) G
        W <- (1 - lr * weight_decay) W - lr sqrt(max(1, rows / columns)) orth((1 - mu) G + mu M)

    orth(U S V^T) is about U V^T, by five Newton-Schulz iterations. Each part of a parameter (`Parameter.split`) is
    a matrix of its own.

    DeepSpeed's own class cannot be used: with ZeRO 1 it treats a parameter as one matrix and clips the
    orthogonalised update, and its bf16 optimizer refuses model parallelism. DeepSpeed accepts this class as client
    optimizer: ZeRO replaces the parameters of each group by one flat partition of fp32 weights, whose gradient is
    already reduced, unscaled and clipped. This class finds the matrices in the partition.

    Args:
        parameter_groups: of this rank; see `layout.parameter_groups`.
        rows: the row of each parameter.
        params: muon_lr, adam_lr, momentum, ns_method, betas, eps and weight_decay; all are required.
        groups: process groups of this rank.
    """

    def __init__(
        self,
        parameter_groups: Sequence[Mapping[str, Any]],
        rows: Mapping[nn.Parameter, Parameter],
        params: Mapping[str, Any],
        groups: Groups,
    ) -> None:
        self._groups = groups
        self._matrices = {
            group["moe"]: _Matrices.of(
                [rows[parameter] for parameter in group["params"]],
                groups.topology.tp,
                groups.expert_dp if group["moe"] else groups.dp,
            )
            for group in parameter_groups
            if group["muon"]
        }
        muon = {"lr": params["muon_lr"], "momentum": params["momentum"]}
        super().__init__(
            [{**group, **muon} if group["muon"] else dict(group) for group in parameter_groups],
            lr=params["adam_lr"],
            betas=tuple(params["betas"]),
            eps=params["eps"],
            weight_decay=params["weight_decay"],
        )
        self._newton_schulz = _NEWTON_SCHULZ[params["ns_method"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step of both optimizers. A collective over the dp and tp ranks of the stage."""
        groups = self.param_groups
        # Compiled, DeepSpeed's kernels take seconds for every new shape and need a C++ compiler. They are products
        # of matrices, for which compiling gains little.
        with torch.compiler.set_stance("force_eager"):
            for group in groups:  # DeepSpeed calls this once for each, with `param_groups` of one
                if group["muon"]:
                    self._muon_step(group, self._matrices[group["moe"]])
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step()
        self.param_groups = groups

    def _muon_step(self, group: dict[str, Any], matrices: "_Matrices") -> None:
        (flat,) = group["params"]
        state, momentum = self.state[flat], group["momentum"]
        if not state:
            state["step"] = number_tensor(0.0)  # torch's AdamW requires it in every restored state
            state["momentum_buffer"] = torch.zeros_like(flat)
        state["step"] += 1
        state["momentum_buffer"].lerp_(flat.grad, 1 - momentum)
        flat.grad.lerp_(state["momentum_buffer"], momentum)
        self._orthogonalize(flat.grad, matrices)
        flat.mul_(1 - group["lr"] * group["weight_decay"]).sub_(flat.grad, alpha=group["lr"])

    def _orthogonalize(self, partition: Tensor, matrices: "_Matrices") -> None:
        """Replace every matrix in this rank's partition by its update; all owners have equal lengths."""
        begin = dist.get_rank(matrices.owners) * len(partition)
        cut = self._cut_by_borders(partition, begin, matrices)
        for index, (start, stop) in enumerate(matrices.ranges):
            first, last = max(start, begin), min(stop, begin + len(partition))
            if first < last:
                piece = partition[first - begin : last - begin]
                full = cut.get(index, piece)
                piece.copy_(self._orthogonalized(matrices.rows[index], full)[first - start : last - start])

    def _cut_by_borders(self, partition: Tensor, begin: int, matrices: "_Matrices") -> dict[int, Tensor]:
        """Gather the parameters that lie on several ranks: at most one for each border between two owners."""
        length = len(partition)
        cut = {
            index: partition.new_zeros(stop - start)
            for index, (start, stop) in enumerate(matrices.ranges)
            if start // length != (stop - 1) // length
        }
        for index, full in cut.items():
            start, stop = matrices.ranges[index]
            first, last = max(start, begin), min(stop, begin + length)
            if first < last:
                full[first - start : last - start] = partition[first - begin : last - begin]
            dist.all_reduce(full, group=matrices.owners)
        return cut

    def _orthogonalized(self, row: Parameter, flat: Tensor) -> Tensor:
        """Return the update of a parameter from its Nesterov momentum; both flat, this tp rank's slice."""
        tp, tp_size = self._groups.position.tp, self._groups.topology.tp
        full = flat.view(row.slice_shape(tp_size))
        if tp_size > 1:
            slices = [torch.empty_like(full) for _ in range(tp_size)]
            dist.all_gather(slices, full, group=self._groups.tp)
            full = row.merge(slices)
        parts = [self._orthogonalized_matrix(part) for part in row.split(full)]
        return row.slice(row.join(parts), tp, tp_size).reshape(-1)

    def _orthogonalized_matrix(self, matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape
        orthogonal = self._newton_schulz(matrix, steps=_NEWTON_SCHULZ_STEPS)
        return orthogonal.to(matrix.dtype) * max(1, rows / columns) ** 0.5
