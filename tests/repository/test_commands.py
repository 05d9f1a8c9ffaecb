"""Every command that the documentation names is run by tools/commands.py, or left out for a reason."""

import re

from megatron_noloco.cli.main import help_pages
from tools.commands import commands_of, named_commands, row_of, rows, to_run

PAGE = """\
Run `make test` or `LEFT=1 python -m tools.x` and `make`, see `README.md and make`.

    nice python -m tools.x --a 1     # an hour
    megatron-noloco data preprocess --input a \\
        --append-eod
    not a command

```json
{"make": 1}
```

```
launch/mpirun.sh 8 my-run.json
```
"""


def test_commands_are_read_from_blocks_and_spans() -> None:
    assert list(commands_of(PAGE)) == [
        "make test",
        "LEFT=1 python -m tools.x",
        "nice python -m tools.x --a 1",
        "megatron-noloco data preprocess --input a --append-eod",
        "launch/mpirun.sh 8 my-run.json",
    ]


def test_every_command_has_a_row_and_every_pattern_a_command() -> None:
    """A command that a page names for the first time needs a row in tools/commands.txt."""
    table, named = rows(), set(named_commands())
    assert len(named) > 150
    assert [command for command in named if row_of(command, table) is None] == []
    used = {
        pattern
        for command in named
        for pattern in row_of(command, table).patterns
        if re.fullmatch(pattern, command)
    }
    assert [pattern for row in table for pattern in row.patterns if pattern not in used] == []


def test_a_command_that_is_not_run_as_it_is_has_a_reason() -> None:
    table = rows()
    assert [row.patterns for row in table if row.run is None and not row.reason] == []
    assert [row.run for row in table if row.run and not row.reason] == []


def test_the_help_of_every_command_is_run() -> None:
    helps = {command for command in to_run(rows()) if command.endswith("--help")}
    assert helps == {f"{command} --help" for command, _ in help_pages()}
    assert "megatron-noloco data preprocess --help" in helps
