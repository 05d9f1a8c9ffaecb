"""The command `data inspect`."""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="data_command", required=True)
    inspect = commands.add_parser("inspect", help="documents, tokens, lengths, and the first documents")
    inspect.add_argument("prefix", help="path of the .bin and .idx files without their suffix")
    inspect.add_argument("--tokenizer-type", choices=("byte", "HuggingFaceTokenizer"), default="byte")
    inspect.add_argument("--tokenizer-model", help="folder with a tokenizer.json")
    inspect.add_argument("--samples", type=int, default=3, help="documents to show (default: 3)")


def run(args: argparse.Namespace) -> int:
    from megatron_noloco.data.indexed import IndexedTokens
    from megatron_noloco.data.tokenizer import build_tokenizer
    from megatron_noloco.preprocess.inspect import report

    try:
        lines = list(report(IndexedTokens(args.prefix), build_tokenizer(args), args.samples))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0
