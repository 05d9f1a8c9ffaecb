"""The class of mistakes that a user can correct, and a context that says what they are about."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake of the user. Each line of its message says what is wrong, where, and what would be right.

    Commands write the message without a traceback, and end with exit code 2 (`cli/exit_codes.py`).
    """


@contextmanager
def prefix_errors_with(place: str) -> Iterator[None]:
    """Begin each line of a UserError that leaves the context with the file, row or field that it is about."""
    try:
        yield
    except UserError as error:
        lines = [line.removeprefix(f"{place}: ") for line in str(error).splitlines()]
        raise UserError("\n".join(f"{place}: {line}" for line in lines)) from None
