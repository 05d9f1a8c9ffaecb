"""How commands write to stdout."""

import sys


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
