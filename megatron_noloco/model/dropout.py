"""The random states of dropout: all other random numbers of a run are functions of seed and counter."""

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_noloco.pipeline.groups import Groups
from megatron_noloco.plans.draws import Stream, draw_words


def seed_dropout(seed: int, groups: Groups, step: int = 0) -> None:
    """Seed dropout differently in every replica, stage and dp rank, and alike in the tp ranks of a stage.

    Where tp ranks must differ, Megatron-core forks to another generator on CUDA; on a CPU the fork is a no-op.

    Args:
        step: local steps done, so that a rank which starts in the middle of a run draws new numbers.
    """
    at = groups.position
    words = draw_words(1, seed, Stream.DROPOUT, at.replica, at.stage, at.dp, step)
    own_seed = int(words[0] % 2**31)
    torch.manual_seed(own_seed)
    model_parallel_cuda_manual_seed(
        own_seed,
        inference_rng_tracker=not torch.cuda.is_available(),
        tp_rank=at.tp,
        ep_rank=0,
        etp_rank=0,
        force_reset_rng=True,
    )


def random_state() -> dict[str, Tensor]:
    """Return the states of all generators by name, uint8."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng.cuda"] = torch.cuda.get_rng_state()
        tracked = get_cuda_rng_tracker().get_states()
        states |= {f"rng.tracked.{name}": state.cpu() for name, state in tracked.items()}
    return states


def set_random_state(states: dict[str, Tensor]) -> None:
    """Restore what `random_state` returned, without the states of generators that this machine lacks."""
    torch.set_rng_state(states["rng.cpu"])
    if torch.cuda.is_available() and "rng.cuda" in states:
        torch.cuda.set_rng_state(states["rng.cuda"])
        prefix = "rng.tracked."
        get_cuda_rng_tracker().set_states(
            {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
        )
