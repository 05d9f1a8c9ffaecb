"""What `outer` keeps beside the weights, in bytes per parameter."""

from megatron_noloco.plans.fragments import most_under_way
from megatron_noloco.settings import NolocoSettings


def bytes_of_state(noloco: NolocoSettings) -> dict[str, float]:
    """What is kept from round to round."""
    return {"slow weights": 4.0} | ({"outer momentum": 4.0} if noloco.outer_momentum else {})


def bytes_of_rounds(noloco: NolocoSettings, replicas: int, kept_aside: bool = False) -> dict[str, float]:
    """What the rounds that are under way at a time take, all together.

    Args:
        kept_aside: whether a mean waits until it is certain, as in a federation.
    """
    in_pairs = noloco.group_size_among(replicas) <= 2
    of_round = {"combined vector": 4.0}
    if in_pairs and noloco.payload == "fp32":
        of_round["received vector"] = 4
    elif in_pairs:
        of_round |= {"codes": int(noloco.payload.removeprefix("int")) / 4, "sketches and steps": 0.1}
    if kept_aside:
        of_round["mean"] = 4
    if noloco.delay_steps or noloco.chooses_delay:
        of_round["snapshot"] = 4
    share = rounds_at_a_time(noloco) / noloco.fragments
    return {vector: size * share for vector, size in of_round.items()}


def rounds_at_a_time(noloco: NolocoSettings) -> int:
    longest_delay = noloco.local_steps if noloco.chooses_delay else noloco.delay_steps
    return most_under_way(noloco.local_steps, noloco.fragments, longest_delay)
