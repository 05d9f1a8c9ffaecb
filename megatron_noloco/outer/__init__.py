"""The method as a library: what happens between replicas, in anybody's training loop.

Needs torch, numpy and pydantic only. A loop makes an `OuterOptimizer` and calls `after_local_step` after each step
of its own optimizer; see `examples/plain_torch.py`.
"""

from megatron_noloco.outer.channels import Channel, PartnerLostError, PartnerTimeoutError
from megatron_noloco.outer.exchange import AnyExchange, Exchange, group_mean
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.optimizer import (
    ROUNDS,
    VECTORS,
    NoRounds,
    OuterOptimizer,
    Rounds,
    SeparateJobs,
    mean_model,
    rounds_from_lists,
    rounds_to_lists,
)
from megatron_noloco.outer.round import RoundReport
from megatron_noloco.outer.weights import TorchWeights, Weights

__all__ = [
    "ROUNDS",
    "VECTORS",
    "AnyExchange",
    "Channel",
    "Exchange",
    "ExchangeReport",
    "MeanPiece",
    "NoRounds",
    "OuterOptimizer",
    "PartnerLostError",
    "PartnerTimeoutError",
    "RoundReport",
    "Rounds",
    "SeparateJobs",
    "TorchWeights",
    "Weights",
    "group_mean",
    "mean_model",
    "rounds_from_lists",
    "rounds_to_lists",
]
