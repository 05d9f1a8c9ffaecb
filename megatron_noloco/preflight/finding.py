"""What a check says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        area: what was looked at, such as "MPI".
        state: "problem" stops a training or makes it wrong; a "note" costs something.
        advice: what to do about it.
        figures: what was measured, for scripts.
    """

    area: str
    state: State
    what: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
