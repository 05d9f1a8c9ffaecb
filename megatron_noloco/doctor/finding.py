"""What a check says."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        area: what was looked at, such as "MPI".
        state: "problem" stops a training or makes it wrong; a "note" costs something.
        advice: what to do about it.
    """

    area: str
    state: State
    what: str
    advice: str = ""
