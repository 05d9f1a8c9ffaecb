"""The vectors of the outer optimizer, and the arithmetic of a round on them."""

import torch
from torch import Tensor

from megatron_noloco.outer.mean import MeanPiece
from megatron_noloco.outer.memory import HOST, buffer
from megatron_noloco.outer.settings import OuterSettings
from megatron_noloco.outer.weights import Weights

_AT_ONCE = 1 << 20  # elements formed at a time: they stay in cache


class OuterVectors:
    """Symbols are those of `optimizer` and `delayed`.

    Args:
        weights: theta.
        device_buffers: whether the transport sends from where the weights are.

    Attributes:
        slow_weights: phi, fp32, shape [weights.length].
        momentum: delta, likewise.
        spare: c during an exchange; free otherwise.
        correction: theta_s, then phi - theta_s; empty until a round is delayed.
    """

    def __init__(self, weights: Weights, settings: OuterSettings, device_buffers: bool) -> None:
        self.weights = weights
        self.settings = settings
        length = weights.length
        self._home = weights.device if settings.slow_weights == "device" else HOST
        self.slow_weights = buffer(length, self._home)
        weights.read_into(self.slow_weights)
        self.momentum = buffer(length, self._home).zero_()
        self.spare = buffer(length, self._home if device_buffers else HOST)
        self.correction = buffer(0, self._home)
        if settings.delay_steps:
            self.allow_delay()

    def allow_delay(self) -> None:
        """Have memory for the correction."""
        if not len(self.correction):
            self.correction = buffer(len(self.slow_weights), self._home)

    @torch.no_grad()
    def combine(self, delayed: bool) -> Tensor:
        """c = beta * theta + (gamma - beta) * phi, formed where phi lies. Delayed: the correction is theta_s."""
        pull = self.settings.gamma - self.settings.outer_lr
        for start in range(0, len(self.spare), _AT_ONCE):
            place = slice(start, start + _AT_ONCE)
            phi, combined = self.slow_weights[place], self.spare[place]
            piece = combined if combined.device == phi.device else torch.empty_like(phi)
            if delayed:
                self.weights.read_into(self.correction[place], start)
                piece.copy_(self.correction[place])
            else:
                self.weights.read_into(piece, start)
            piece.mul_(self.settings.outer_lr)
            if pull:
                piece.add_(phi, alpha=pull)
            if piece is not combined:
                combined.copy_(piece)
        return self.spare

    @torch.no_grad()
    def step(self, piece: MeanPiece, delayed: bool) -> Tensor:
        """The outer step of some elements; returns their phi. Delayed: the correction becomes phi - theta_s."""
        # Piece by piece while it is in cache: several passes over memory become one.
        place = slice(piece.start, piece.stop)
        phi, delta = self.slow_weights[place], self.momentum[place]
        delta.mul_(self.settings.outer_momentum).add_(piece.mean.to(delta.device))
        delta.sub_(phi, alpha=self.settings.gamma)
        phi.add_(delta)
        if delayed:
            torch.sub(phi, self.correction[place], out=self.correction[place])
        return phi

    @torch.no_grad()
    def merge(self) -> None:
        """theta <- theta + (phi - theta_s)."""
        with self.weights.writing() as write:
            for start in range(0, len(self.correction), _AT_ONCE):
                correction, fast = (
                    vector[start : start + _AT_ONCE] for vector in (self.correction, self.spare)
                )
                fast = fast if fast.device == correction.device else torch.empty_like(correction)
                self.weights.read_into(fast, start)
                write(start, fast.add_(correction))
