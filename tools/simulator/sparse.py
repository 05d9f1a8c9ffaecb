"""SparseLoCo (arXiv 2508.15706), to compare with: of its outer step only this simulation exists."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_noloco.settings import NolocoSettings

CHUNK = 4096  # weights of one tensor; an index within it has 12 bits
_INDEX_BITS, _VALUE_BITS, _MAGNITUDES = 12, 2, 2 * 16  # the last: two of bf16 in a chunk

Code = Callable[[Tensor], Tensor]
"""From what each replica has to send, [R, elements], to what is decoded of it, zero where nothing was sent."""


@dataclass(frozen=True)
class Sparsity:
    """What a replica sends in a round.

    Attributes:
        density: the share of each chunk's elements that are sent, the largest ones; at least one.
        error_decay: the share of what was not sent that is kept for the next round.
    """

    density: float
    error_decay: float = 0.95

    def coded(self, sizes: Sequence[int], vectors: Tensor) -> Tensor:
        """Return what is decoded of vectors [R, elements] of tensors of these sizes.

        A value is its sign and one of two magnitudes: the mean of those above their mean, or of the others.
        """
        decoded = torch.zeros_like(vectors)
        chunks = list(_chunks(sizes))
        for part, out in zip(vectors.split(chunks, dim=1), decoded.split(chunks, dim=1), strict=True):
            places = part.abs().topk(self._sent(part.shape[1]), dim=1).indices
            values = part.gather(1, places)
            large = values.abs() > values.abs().mean(dim=1, keepdim=True)
            rounded = torch.zeros_like(values)
            for chosen in (large, ~large):
                total = (values.abs() * chosen).sum(dim=1, keepdim=True)
                rounded += chosen * (total / chosen.sum(dim=1, keepdim=True).clamp(min=1)).bfloat16()
            out.scatter_(1, places, rounded * values.sign())
        return decoded

    def payload_bytes(self, sizes: Sequence[int]) -> int:
        """Return the bytes of one replica's code: of indices, or of a bit for each weight where that is less."""
        bits = (
            min(_INDEX_BITS * self._sent(size), size) + _VALUE_BITS * self._sent(size) + _MAGNITUDES
            for size in _chunks(sizes)
        )
        return -(-sum(bits) // 8)

    def _sent(self, size: int) -> int:
        return max(1, round(self.density * size))


class SparseLoco:
    """Runs a round of all replicas after every `local_steps`: sparse outer gradients with error feedback.

    Each replica adds phi - theta to what it has not sent yet, sends a code of it, and keeps the rest. The mean of
    what all sent is the outer gradient, of the step with `outer_lr` and a heavy ball's `outer_momentum`.

    Args:
        weights: theta, fp32, shape [R, elements], overwritten in each round.
    """

    def __init__(self, weights: Tensor, settings: NolocoSettings, error_decay: float, code: Code) -> None:
        self.weights, self.settings, self.error_decay, self.code = weights, settings, error_decay, code
        self.slow_weights = weights[0].clone()
        self._momentum = torch.zeros_like(self.slow_weights)
        self._unsent = torch.zeros_like(weights)

    def tensors(self) -> list[Tensor]:
        """Return the live tensors of the state besides the weights."""
        return [self.slow_weights, self._momentum, self._unsent]

    def after_local_step(self, done: int) -> bool:
        """Return whether a round was due after `done` local steps; it was then run."""
        if done % self.settings.local_steps:
            return False
        self._unsent.mul_(self.error_decay).add_(self.slow_weights - self.weights)
        sent = self.code(self._unsent)
        self._unsent -= sent
        self._momentum.mul_(self.settings.outer_momentum).add_(sent.mean(dim=0), alpha=self.settings.outer_lr)
        self.slow_weights -= self._momentum
        self.weights.copy_(self.slow_weights)
        return True


def _chunks(sizes: Sequence[int]) -> Iterator[int]:
    for size in sizes:
        yield from [CHUNK] * (size // CHUNK)
        if size % CHUNK:
            yield size % CHUNK
