"""The class of mistakes that a user can correct."""


class UserError(ValueError):
    """A mistake of the user. Each line of its message says what is wrong, where, and what would be right.

    Commands write the message without a traceback, and end with exit code 2 (`cli/exit_codes.py`).
    """
