"""The random numbers of dropout: the only ones in a run that are a state, not a function of seed and counter."""

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_noloco.pipeline.groups import Groups
from megatron_noloco.plans.draws import Stream, draw_words


def seed_dropout(seed: int, groups: Groups, step: int = 0) -> None:
    """Seed dropout: differently in every replica, stage and dp rank, alike in the tp ranks of a stage.

    Where tp ranks must differ, core forks to a generator of its own on CUDA; on a CPU that fork is a no-op.

    Args:
        step: local steps done. A rank that takes this place in the middle of a run draws new numbers.
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
    """Return the states of all generators, uint8, by name."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng.cuda"] = torch.cuda.get_rng_state()
        tracked = get_cuda_rng_tracker().get_states()
        states |= {f"rng.tracked.{name}": state.cpu() for name, state in tracked.items()}
    return states


def set_random_state(states: dict[str, Tensor]) -> None:
    """Put back what `random_state` returned; states of generators this machine lacks are ignored."""
    torch.set_rng_state(states["rng.cpu"])
    if torch.cuda.is_available() and "rng.cuda" in states:
        torch.cuda.set_rng_state(states["rng.cuda"])
        prefix = "rng.tracked."
        get_cuda_rng_tracker().set_states(
            {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
        )
