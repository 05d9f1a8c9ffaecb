"""What kind of number a caller gave, for values that no schema has checked before."""

import math
from numbers import Integral, Real


def check_integers(**values: object) -> None:
    """Raises ValueError for the first that is no integer."""
    for name, value in values.items():
        if not isinstance(value, Integral):
            raise ValueError(f"{name} must be an integer, not {value!r}")


def check_finite(**values: object) -> None:
    """Raises ValueError for the first that is no finite number."""
    for name, value in values.items():
        if not (isinstance(value, Real) and math.isfinite(value)):
            raise ValueError(f"{name} must be a finite number, not {value!r}")
