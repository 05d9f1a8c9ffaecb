"""The block `noloco`: the settings of the method and those of the trainer alone, and their two recipes."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_noloco.fields import Also, Positive, field, offered_field, own_field
from megatron_noloco.settings import K_MEANING, PAPER, NolocoSettings

MOST_WAITING = 0.1  # share of the time, with local_steps "auto"
_PAPER = ", ".join(f"{name} {value}" for name, value in PAPER.items())


class TrainerSettings(NolocoSettings):
    """The method, as the JSON block `noloco` of the trainer: rounds between replicas, and routing."""

    recipe: Literal["recommended", "paper"] = offered_field(
        "recommended",
        'Values of fields that are left out. "recommended": the defaults here, but where none of group_size, '
        "pairing, payload, sites is given, groups of 8 from 9 replicas in one job on, of 16 from 32 on. "
        f'"paper": {_PAPER}. A run that is continued keeps its groups.',
    )
    local_steps: Annotated[Positive, Also("auto")] = field(
        "auto",
        f'{K_MEANING} "auto" (with all replicas in one job): as few as can be at first, until most_waiting, which '
        f"is then {MOST_WAITING}, chooses k. A federation needs a number.",
    )
    most_waiting: Annotated[float, Field(gt=0, lt=1)] | None = own_field(
        None,
        "Largest share of the time that training may wait for exchanges: after the first rounds, which are "
        "measured, k becomes the smallest number with which it waits no longer; null: k stays local_steps.",
    )
    enabled: bool = own_field(True, "Whether replicas average at all; false: each replica trains alone.")
    final_average: bool = offered_field(
        True,
        "Whether the last local step is followed by plain averages that make all replicas equal to their mean: "
        "one exchange for each prime factor of replicas; in a federation over a tree of the replicas that are "
        "there.",
    )
    transport: Literal["auto", "mpi", "torch"] = own_field(
        "auto", 'Library that carries exchanges; "auto" is MPI if the job was started by mpirun.'
    )
    routing: Literal["off", "round", "microbatch"] = own_field(
        "off",
        "Whether microbatches pass through pipeline stages of other replicas, on routes that are drawn anew for "
        'each "round" or "microbatch".',
    )

    @classmethod
    def left_out(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the recipe that is named, and of local_steps "auto"."""
        chosen: dict[str, Any] = dict(PAPER) if given.get("recipe") == "paper" else {"local_steps": "auto"}
        steps = given.get("local_steps", chosen["local_steps"])
        chosen = {name: value for name, value in chosen.items() if name not in given}
        if steps == "auto":
            others = (given.get(name) for name in ("fragments", "overlap_steps"))
            chosen["local_steps"] = max([1, *(number for number in others if isinstance(number, int))])
            if "most_waiting" not in given:
                chosen["most_waiting"] = MOST_WAITING
        return chosen

    @property
    def active_method(self) -> Literal["noloco", "diloco", "none"]:
        """Return the method in force; "none" where `enabled` is false."""
        return self.method if self.enabled else "none"


def recommended(replicas: int) -> dict[str, Any]:
    """Return the settings that go with so many replicas in one job, by docs/evidence.md, "Settings to start from".

    `NolocoSettings(**recommended(replicas))`; in JSON `"recipe": "recommended"`, which leaves a file as it is that
    gives one of them.
    """
    group_size = 2 if replicas < 9 else 8 if replicas < 32 else 16
    return {"group_size": group_size, "pairing": "auto", "payload": "int4"}
