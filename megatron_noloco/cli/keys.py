"""The command `keys`."""

import argparse
from pathlib import Path

from megatron_noloco.cli.output import say


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    keys = commands.add_parser("keys", help="make the key of a federation, which every member needs")
    keys.add_argument("file", help="to write; it must not exist yet")
    keys.set_defaults(run=_keys)


def _keys(args: argparse.Namespace) -> int:
    from megatron_noloco.federation.keys import Keys

    try:
        Keys.make(Path(args.file))
    except OSError as error:
        raise ValueError(f"keys: cannot write {args.file}: {error.strerror}") from None
    say(f"{args.file}: copy it to each replica's host, readable by you alone; federation.key_file names it")
    return 0
