"""Replicas as jobs of their own: what a job has to say about itself and the others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_noloco.plans.kinds import check_finite, check_integers


@dataclass(frozen=True, kw_only=True)
class Federation:
    """This job is one replica; the others are other jobs.

    All jobs give the same but for `slot`, `listen`, `advertise` and `local_steps`.

    Attributes:
        slot: the number of this job's replica, from 0.
        slots: replicas that there may be. One that is not there costs its partner of a round a bye.
        rendezvous: how the jobs find each other: "file://FOLDER", which all can write, or
            "tcp://HOST:PORT,HOST:PORT,...", addresses of one or more jobs, of which one that answers is enough.
        key_file: of the key that makes a job a member, and with which all that passes is encrypted; made by
            `megatron-noloco keys FILE`, the same for all jobs. None: in the open, for a network that is trusted.
        listen: where the first rank of the job listens, as ZeroMQ writes it, and its others at the ports that
            follow; port 0 is any. None: any port with a folder; with addresses, the port that all of them have.
        advertise: where the others reach the first rank, "tcp://HOST:PORT", and its others at the ports that
            follow, if that is not where it listens: behind a router that passes these ports on. None: there.
        shortest_deadline_seconds: for which a partner is waited for at least, however quick exchanges are; at
            most it is `OuterSettings.deadline_seconds`.
        rounds_behind: a job that is so many rounds behind is not waited for, and goes on where half of the others
            are; see `Attached.done`.
        local_steps: "all": the job takes all local steps, and where it is slow its partners wait; "auto": where it
            is slower than half of the others it leaves out local steps before a round, so that `Attached.done`
            jumps often. What the loop does every so many steps of `done` it then has to look for.
        start_with: jobs, this one included, that `attach` waits for, `OuterSettings.deadline_seconds` at most.

    Raises ValueError for what is out of range, or of the wrong kind.
    """

    slot: int
    slots: int
    rendezvous: str
    key_file: str | Path | None
    listen: str | None = None
    advertise: str | None = None
    shortest_deadline_seconds: float = 5.0
    rounds_behind: int = 3
    local_steps: Literal["auto", "all"] = "all"
    start_with: int = 1

    def __post_init__(self) -> None:
        check_integers(
            slot=self.slot, slots=self.slots, rounds_behind=self.rounds_behind, start_with=self.start_with
        )
        check_finite(shortest_deadline_seconds=self.shortest_deadline_seconds)
        for name, sound, range_ in (
            ("slots", self.slots >= 2, "at least 2"),
            ("slot", 0 <= self.slot < self.slots, f"from 0 to slots - 1 = {self.slots - 1}"),
            ("shortest_deadline_seconds", self.shortest_deadline_seconds > 0, "above 0"),
            ("rounds_behind", self.rounds_behind >= 1, "at least 1"),
            ("local_steps", self.local_steps in ("auto", "all"), '"auto" or "all"'),
            ("start_with", 1 <= self.start_with <= self.slots, f"from 1 to slots {self.slots}"),
        ):
            if not sound:
                raise ValueError(f"Federation: {name} must be {range_}, not {getattr(self, name)!r}")
