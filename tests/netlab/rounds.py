"""Times rounds on a slow network, and all-reduces of the same vector."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tests.netlab.lab import lab
from tests.netlab.network import Link


class Launch(NamedTuple):
    """A measurement of `rank`, and its options of mpirun."""

    way: str
    options: tuple[str, ...] = ()


def _algorithm(number: int) -> Launch:
    choice = ("coll_tuned_use_dynamic_rules", "1", "coll_tuned_allreduce_algorithm", str(number))
    return Launch("allreduce", ("--mca", *choice[:2], "--mca", *choice[2:]))


LAUNCHES = {
    "round": Launch("round"),
    "round of a federation": Launch("federation"),
    "exchange of new partners": Launch("new partners"),
    "MPI_Allreduce": Launch("allreduce"),
    "MPI_Allreduce, ring": _algorithm(4),
    "MPI_Allreduce, recursive doubling": _algorithm(3),
    "MPI_Allreduce, tree": _algorithm(2),  # a reduction to one rank, and a broadcast
    "gloo all_reduce": Launch("gloo"),
}


def measure(
    hosts: Sequence[int], link: Link, ways: Sequence[str], length: int, repeats: int, pause_seconds: float,
    options: Sequence[str], congestion: str,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield a row per number of hosts and way, with medians of the mean and of the slowest rank's seconds.

    Args:
        length: bytes of the fp32 vector.
        repeats: of which the first is left out.
        pause_seconds: of silence before each.
        options: more options of mpirun.

    Raises LabUnavailableError, and what `Lab.mpirun` raises.
    """
    for number in hosts:
        for way in ways:
            with lab([link] * number, congestion) as there:
                arguments = [str(length), str(repeats), str(pause_seconds), str(there.folder)]
                name, chosen = LAUNCHES[way]
                said = there.mpirun([*options, *chosen], "tests.netlab.rank", name, *arguments)
                figures = json.loads(said.splitlines()[-1])
            yield {"hosts": number, "way": way, **figures}
