"""How long Adam's second moment remembers."""

import math

# Of the squared gradients, in tokens of a replica: that of beta2 0.95 at batches of 0.5M tokens.
HALF_LIFE_TOKENS = 6.8e6
# Of a run that a half-life takes at most, so that the second moment of a short run still follows its gradients.
LONGEST_HALF_LIFE = 0.1


def beta2_for(tokens_per_step: int, half_life_tokens: float, train_iters: int) -> float:
    """beta2 of Adam with which a squared gradient loses half of its weight after `half_life_tokens`.

    A half-life fixed in tokens, beta2' = beta2^(B' / B) for batches of B' and B tokens, lets small batches learn
    as well per token as large ones (Marek et al., arXiv 2507.07101). It is at most the share `LONGEST_HALF_LIFE`
    of the run.

    Args:
        tokens_per_step: the batch of one replica, in tokens.
        half_life_tokens: in tokens of one replica.
        train_iters: local steps of the run.
    """
    steps = min(half_life_tokens / tokens_per_step, LONGEST_HALF_LIFE * train_iters)
    return 0.5 ** (1 / steps)


def half_life_steps(beta2: float) -> float:
    """The inverse, in local steps: beta2 ** half_life_steps(beta2) is 0.5. For 0 < beta2 < 1."""
    return math.log(0.5) / math.log(beta2)
