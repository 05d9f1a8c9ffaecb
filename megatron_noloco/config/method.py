"""Which method a run uses."""

from typing import Literal

Method = Literal["noloco", "diloco"]
ActiveMethod = Literal["noloco", "diloco", "none"]


def active_method(enabled: bool, method: Method) -> ActiveMethod:
    """The method in force: "none" when rounds are switched off, whatever `method` says."""
    return method if enabled else "none"
