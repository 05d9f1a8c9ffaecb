"""When each fragment of the weights has its rounds, and how rare rounds must be to cost little time.

With F fragments, fragment f has its round r after local step r k + (f + 1) k // F. So every fragment has one round
in k local steps, and the last one has it where the round of all weights would be.
"""

import math


def next_after(done: int, local_steps: int, fragments: int) -> tuple[int, int]:
    """Return the round and fragment that are due next, after more than `done` local steps.

    `fragments` must be from 1 to `local_steps`, so that no two are due at the same step.
    """
    round_index, step = divmod(done, local_steps)
    return round_index, -(-(step + 1) * fragments // local_steps) - 1


def due_after(round_index: int, fragment: int, local_steps: int, fragments: int) -> int:
    """Return the number of local steps after which a round of a fragment is due."""
    return round_index * local_steps + (fragment + 1) * local_steps // fragments


def fragment_after(done: int, local_steps: int, fragments: int) -> tuple[int, int] | None:
    """Return the round and fragment that are due after `done` local steps; None after most steps."""
    round_index, fragment = next_after(done - 1, local_steps, fragments)
    due = due_after(round_index, fragment, local_steps, fragments)
    return (round_index, fragment) if due == done else None


def most_under_way(local_steps: int, fragments: int, overlap_steps: int) -> int:
    """Return how many rounds can be under way at a time, when each is merged `overlap_steps` after it began.

    Rounds j = 1, 2, ... of all fragments are due after j k // F local steps. So in w steps from a multiple of k on
    w F / k of them begin, rounded up, and nowhere more.
    """
    return -(-max(1, overlap_steps) * fragments // local_steps)


def fewest_steps(
    exchange_seconds: float, step_seconds: float, most_waiting: float, least: int = 1, most: float = math.inf
) -> int:
    """Return the fewest local steps between rounds with which exchanges take at most a share of the time.

    Args:
        exchange_seconds: of all fragments together.
        most_waiting: the share.
        least: local steps that the run can have, at least.
        most: and at most.
    """
    enough = math.ceil(exchange_seconds * (1 - most_waiting) / (most_waiting * step_seconds))
    return int(min(max(enough, least, 1), most))
