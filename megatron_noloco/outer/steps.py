"""How large a step of the code (payload.py) is, from sketches of the vectors.

The sketch of a cell of 128 elements is their sum with random signs. The difference of two members' sketches has
the expected square 128 sigma^2, sigma the root mean square of the difference of their elements (Alon, Matias and
Szegedy, "The space complexity of approximating the frequency moments", 1996). The step is such that RANGE[bits]
sigma fit into the code. Sketches come anew with each exchange, with other signs, so nothing has to be remembered,
or saved in a checkpoint, from round to round.

RANGE. A large one makes the steps coarse, a small one lets more differences fall outside. On a transformer of
1.1 M weights trained with AdamW, 15 local steps a round, the differences of a block had a kurtosis of 4 in the
median and 8 in the worst tenth; 0 % of the blocks fell outside in 16 bits, 0.5 % in 8 and 2 % in 4 (with RANGE 5:
6 %).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_noloco.outer.payload import BLOCK, slices

RANGE = {16: 32.0, 8: 8.0, 4: 6.0}  # root mean squares of the difference that a code of so many bits holds

_NEAR = 2  # blocks on each side, see `_smooth`
_UNLUCKY = 8.0  # less than an eighth of the true square is found in 3 blocks of 100
_FINEST = 2.0**-22  # of the root mean square of c: a finer step is below the resolution of fp32
_SMALLEST = 2.0**-100  # step where all is zero
_AT_ONCE = 8192  # blocks


def find_steps(sketches: Sequence[Tensor], bits: int, out: Tensor) -> None:
    """Fill `out`, [blocks], with the steps for members of these sketches; 0 where a member is not finite.

    Two members may call it with the two sketches in either order, and get the same. Steps have 8 significant
    bits: the product of a step and a difference is exact in fp32.
    """
    first, *others = sketches
    for at in slices(len(first), _AT_ONCE):
        apart = torch.zeros(len(out[at]))
        size = _energy(first[at])
        for other in others:
            apart += _energy(first[at] - other[at]) / len(others)
            size += _energy(other[at])
        finite = torch.isfinite(size) & torch.isfinite(apart)
        apart, size = (torch.where(finite, energy, 0.0) for energy in (apart, size))
        apart, size = (_smooth(energy) / BLOCK for energy in (apart, size))
        step = apart.sqrt_().mul_(RANGE[bits] / (2 ** (bits - 1) - 1))
        step = torch.maximum(step, size.div_(len(sketches)).sqrt_().mul_(_FINEST)).clamp_(min=_SMALLEST)
        out[at] = step.mul_(1 + 2**-8).bfloat16().float().mul_(finite)


def _energy(sketches: Tensor) -> Tensor:
    """Expected to be the sum of the squares of a block's elements; shape [blocks]."""
    square = sketches.square()
    half = square[:, :2].add_(square[:, 2:])
    return half[:, 0] + half[:, 1]


def _smooth(energy: Tensor) -> Tensor:
    """The mean of the blocks nearby where it is larger, but not beyond _UNLUCKY times a block's own.

    A block's own four sketches are small by chance now and then, and blocks nearby are often alike.
    """
    padded = torch.nn.functional.pad(energy, (_NEAR, _NEAR))
    total = torch.zeros_like(energy)
    for shift in range(2 * _NEAR + 1):
        total += padded[shift : shift + len(energy)]
    return torch.maximum(energy, torch.minimum(total / (2 * _NEAR + 1), _UNLUCKY * energy))
