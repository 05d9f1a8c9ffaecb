"""The vectors of the outer optimizer, and the arithmetic of a round on them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_noloco.outer.mean import MeanPiece, gathered
from megatron_noloco.outer.memory import HOST, buffer
from megatron_noloco.outer.spans import Spans
from megatron_noloco.outer.streams import SideStream, wait_for
from megatron_noloco.outer.weights import Weights
from megatron_noloco.settings import NolocoSettings

_AT_ONCE = 1 << 20  # elements formed at a time: they stay in cache


class OuterVectors:
    """Symbols are those of `optimizer` and `round`. A round concerns some elements: `spans`.

    Args:
        weights: theta.

    Attributes:
        home: where slow weights and momentum lie.
        side: where their arithmetic is queued.
        slow_weights: phi, fp32, shape [weights.length].
        momentum: delta, likewise; None with alpha = 0, where nothing of it is kept.
    """

    def __init__(self, weights: Weights, settings: NolocoSettings) -> None:
        self.weights = weights
        self.settings = settings
        self.home = weights.device if settings.slow_weights == "device" else HOST
        self.slow_weights = buffer(weights.length, self.home)
        weights.read_into(self.slow_weights)
        self.momentum = buffer(weights.length, self.home).zero_() if settings.outer_momentum else None
        self.side = SideStream(self.home)
        self._landed = buffer(_AT_ONCE, HOST) if self.home.type == "cuda" else None

    @torch.no_grad()
    def combine(self, spans: Spans, combined: Tensor, snapshot: Tensor | None) -> None:
        """Fill `combined` with c = beta * theta + (gamma - beta) * phi, formed where phi lies.

        Args:
            combined: shape [spans.length], on any device.
            snapshot: to be filled with theta_s, likewise, where phi lies; None for a round without delay.

        On return all is written: `combined` can be sent.
        """
        pull = self.settings.gamma - self.settings.outer_lr
        for ours, place in _in_cache(spans):
            phi, c = self.slow_weights[place], combined[ours]
            piece = c if c.device == phi.device else torch.empty_like(phi)
            if snapshot is None:
                self.weights.read_into(piece, place.start)
            else:
                self.weights.read_into(snapshot[ours], place.start)
                piece.copy_(snapshot[ours])
            piece.mul_(self.settings.outer_lr)
            if pull:
                piece.add_(phi, alpha=pull)
            if piece is not c:
                c.copy_(piece, non_blocking=True)
        wait_for(self.home)

    def to_step(self, means: Iterator[MeanPiece]) -> Iterator[MeanPiece]:
        """The pieces for `step`. Where slow weights lie on an accelerator: of a size that is worth a copy."""
        return means if self._landed is None else gathered(means, self._landed)

    @torch.no_grad()
    def step(self, spans: Spans, mean: MeanPiece, snapshot: Tensor | None) -> list[tuple[int, Tensor]]:
        """The outer step of some elements; a snapshot becomes the correction, phi - theta_s.

        On an accelerator it does not wait for local steps that are queued there; on return it is done.

        Returns phi in pieces, each with the place of its first element in the vector of weights.
        """
        # Piece by piece while it is in cache: several passes over memory become one.
        moved = []
        with self.side.used():
            for ours, place in spans.within(mean.start, mean.stop):
                phi = self.slow_weights[place]
                delta = torch.zeros_like(phi) if self.momentum is None else self.momentum[place]
                c = mean.mean[ours.start - mean.start : ours.stop - mean.start]
                delta.mul_(self.settings.outer_momentum).add_(c.to(delta.device, non_blocking=True))
                delta.sub_(phi, alpha=self.settings.gamma)
                phi.add_(delta)
                if snapshot is not None:
                    torch.sub(phi, snapshot[ours], out=snapshot[ours])
                moved.append((place.start, phi))
        return moved

    @torch.no_grad()
    def merge(self, spans: Spans, correction: Tensor, spare: Tensor) -> None:
        """theta <- theta + (phi - theta_s); `spare` is overwritten. Both have shape [spans.length]."""
        with self.weights.writing() as write:
            for ours, place in _in_cache(spans):
                shift, fast = correction[ours], spare[ours]
                fast = fast if fast.device == shift.device else torch.empty_like(shift)
                self.weights.read_into(fast, place.start)
                write(place.start, fast.add_(shift))


def _in_cache(spans: Spans) -> Iterator[tuple[slice, slice]]:
    """All elements in short pieces: the place of each in the vector of the spans, and in that of all weights."""
    for start in range(0, spans.length, _AT_ONCE):
        yield from spans.within(start, min(start + _AT_ONCE, spans.length))
