"""The command `convert`."""

import argparse
import json
from pathlib import Path

from megatron_noloco.cli.options import Commands, add_command, at_least_one, say
from megatron_noloco.errors import UserError
from megatron_noloco.files import write_text, writing

_MORE = """Reads a DeepSpeed JSON, the arguments of Megatron-LM's pretrain_gpt.py (a shell script, of which
nothing is run, a file of arguments, or YAML), a TOML of torchtitan, or Hugging Face's TrainingArguments (JSON,
YAML, or a script). Several files are read together: a DeepSpeed JSON takes its "auto" from the TrainingArguments.
Each setting is carried over, or named with its other name here, why it has no meaning, or what to do instead."""


def add_commands(commands: Commands) -> None:
    convert = add_command(
        commands,
        "convert",
        "write a config from the settings of DeepSpeed, Megatron-LM, torchtitan or Hugging Face",
        "convert ds_config.json --config configs/quickstart.json --output my-run.json",
        _MORE,
    )
    add = convert.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a file of settings")
    add("--output", required=True, type=Path, help="the config file to write")
    add(
        "--config",
        type=Path,
        help="a config, or a part of one, that has what the files do not say",
    )
    add("--world-size", type=at_least_one, metavar="N", help="ranks of the run (default: as the files say)")
    replicas = (
        "copies of the model that average (default: one for each node, else for each data-parallel rank)"
    )
    add("--replicas", type=at_least_one, metavar="N", help=replicas)
    convert.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> int:
    from megatron_noloco.convert.conversion import account_lines, convert

    if args.output.exists():
        raise UserError(f"{args.output}: exists; give another --output, or remove it")
    conversion = convert(args.files, args.config, args.world_size, args.replicas)
    with writing(args.output, "--output"):
        write_text(args.output, json.dumps(conversion.content, indent=2) + "\n")
    say(*account_lines(conversion), f"{args.output}: written; megatron-noloco config --check {args.output}")
    return 0
