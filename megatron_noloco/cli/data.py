"""The commands `data preprocess`, `data inspect` and `data cache`."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_noloco.cli.options import Commands, add_command, at_least_one, say
from megatron_noloco.errors import UserError
from megatron_noloco.files import outside
from megatron_noloco.job.leaving import INTERRUPTED

if TYPE_CHECKING:
    import numpy as np

    from megatron_noloco.data.indexed import IndexedDataset
    from megatron_noloco.data.tokenizer import Tokenizer, TokenizerChoice

_PREPROCESS = """\
Inputs are JSON lines (.jsonl, .json, .ndjson: one document per line), Parquet and Arrow (.parquet, .arrow: one
document per row) and text (anything else: one document per file), JSON lines and text also as .gz, .zst or .bz2;
folders are searched. A command that was stopped leaves no dataset: give it again."""
_PREVIEW_TOKENS, _PREVIEW_LEARNT = 60, 1000  # of a document, of a record


def add_commands(commands: Commands) -> None:
    data = add_command(
        commands, "data", "make a Megatron dataset from text, or look into one", "data preprocess --help"
    )
    subcommands = data.add_subparsers(required=True)
    preprocess = add_command(
        subcommands,
        "preprocess",
        "turn text into Megatron's indexed datasets, PREFIX_KEY_document.{bin,idx}",
        "data preprocess --input corpus --output-prefix data/corpus --append-eod",
        _PREPROCESS,
    )
    add = preprocess.add_argument
    add("--input", nargs="+", required=True, help="files or folders")
    add("--output-prefix", required=True, type=Path, help="path without suffix")
    add("--json-keys", metavar="KEY", default="text", help="key, or column, that holds text (default: text)")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--prepend-bos", action="store_true", help="begin each document with the tokenizer's BOS")
    as_text = "read a special token that a text spells out, such as <|endoftext|>, as text (default: yes)"
    add("--split-special-tokens", action=argparse.BooleanOptionalAction, default=True, help=as_text)
    lost = "largest share of the characters that the tokenizer may lose (default: 0.05)"
    add("--max-lost-characters", type=float, default=0.05, help=lost)
    add("--workers", type=at_least_one, help="threads that encode (default: all cores)")
    preprocess.set_defaults(run=_preprocess)
    inspect = add_command(
        subcommands,
        "inspect",
        "print documents, tokens, lengths, and the first documents of a dataset; of records what is learnt",
        "data inspect data/corpus_text_document",
    )
    what = "a dataset, without the suffixes .bin and .idx; or a text or records, as in the block data"
    inspect.add_argument("data", help=what)
    inspect.add_argument("--samples", type=at_least_one, default=3, help="documents to show (default: 3)")
    inspect.set_defaults(run=_inspect)
    cache = add_command(
        subcommands,
        "cache",
        "list or remove the datasets that runs have made of text and records",
        "data cache --clear",
    )
    clear = "remove these (the beginnings of names are enough), or all if none is named"
    cache.add_argument("--clear", nargs="*", metavar="NAME", help=clear)
    cache.add_argument("--folder", help="the folder in data.cache (default: in the user's cache folder)")
    cache.set_defaults(run=_cache)
    for parser in (preprocess, inspect):
        which = "default: byte, with --tokenizer-model HuggingFaceTokenizer"
        parser.add_argument("--tokenizer-type", choices=("byte", "HuggingFaceTokenizer"), help=which)
        parser.add_argument("--tokenizer-model", help="folder with a tokenizer.json")


def _preprocess(args: argparse.Namespace) -> int:
    from megatron_noloco.data.auto_tokenizer import build_tokenizer
    from megatron_noloco.data.corpus import preprocess

    if args.workers is not None:  # tokenizers reads it when it first encodes
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's notice acts as Ctrl-C
    choice = _tokenizer(args, args.split_special_tokens, args.prepend_bos)
    try:
        tokenizer = build_tokenizer(choice)
        texts, lost = (args.json_keys, args.append_eod), args.max_lost_characters
        output, made = preprocess(args.input, args.output_prefix, tokenizer, *texts, lost)
    except KeyboardInterrupt:
        sys.stderr.write("stopped before all was written; give the command again\n")
        return INTERRUPTED
    say(f"{made.documents} documents, {made.tokens} tokens{made.notes}", str(output))
    return 0


def _cache(args: argparse.Namespace) -> int:
    from megatron_noloco.data.cache import cache_folder, clear, entries

    folder = cache_folder(args.folder)
    if args.clear is not None:
        say(f"{folder}: {clear(folder, args.clear) / 1e6:,.1f} MB removed")
        return 0
    found = entries(folder)
    for entry in found:
        used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
        say(f"{entry.folder.name}  {entry.bytes / 1e6:10,.1f} MB  used {used}  {outside(entry.made.source)}")
    say(f"{folder}: {sum(entry.bytes for entry in found) / 1e6:,.1f} MB")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from megatron_noloco.data.auto_tokenizer import build_tokenizer
    from megatron_noloco.data.indexed import read_indexed
    from megatron_noloco.data.opening import open_any

    tokenizer = build_tokenizer(_tokenizer(args, prepend_bos=None))  # as a config of `import`
    is_dataset = Path(f"{args.data}.idx").exists()
    dataset = read_indexed(args.data) if is_dataset else open_any(args.data, tokenizer)
    say(*_report(dataset, tokenizer, args.samples), *filter(None, [dataset.notes]))
    return 0


def _report(dataset: "IndexedDataset", tokenizer: "Tokenizer", samples: int) -> Iterator[str]:
    """Yield lines that describe an indexed dataset, then one line for each of its first `samples` documents.

    Of records whose answers are learnt apart, a line for each of the first sequences.
    """
    import numpy as np

    bounds = dataset.document_bounds
    lengths = np.diff(dataset.offsets[bounds])
    yield f"dataset: {dataset.name} ({dataset.tokens.nbytes / 1e6:.1f} MB, {dataset.tokens.dtype} tokens)"
    yield f"documents: {len(lengths)}, in {dataset.sequences} sequences"
    yield f"tokens: {len(dataset.tokens)}"
    yield (
        f"document length: shortest {lengths.min()}, median {np.median(lengths):.0f}, "
        f"mean {lengths.mean():.1f}, longest {lengths.max()}"
    )
    shown_of_each, shown_tokens = (1, _PREVIEW_TOKENS) if dataset.mask is None else (samples, _PREVIEW_LEARNT)
    places = (
        (number, place)
        for number in range(min(samples, len(lengths)))
        for place in range(*bounds[number : number + 2])[:shown_of_each]
    )
    for number, place in places:
        document = dataset.part(place, place + 1)
        tokens = document.tokens[:shown_tokens]
        if int(tokens.min(initial=0)) < 0 or int(tokens.max(initial=0)) >= tokenizer.vocab_size:
            ids = " ".join(map(str, tokens[:12]))
            shown = f"tokens {ids} ... (not of this tokenizer: give its own by --tokenizer-model)"
        elif document.mask is None:
            shown = repr(tokenizer.decode(tokens))
        else:
            shown = _with_learnt_marked(tokens, document.mask[: len(tokens)], tokenizer)
        more = "" if len(tokens) == len(document.tokens) else " ..."
        yield f"document {number}: {shown}{more}"


def _with_learnt_marked(tokens: "np.ndarray", mask: "np.ndarray", tokenizer: "Tokenizer") -> str:
    """Return the text of tokens with their special tokens, and that of tokens with a loss in brackets."""
    import numpy as np

    stretches = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(mask)) + 1)
    texts = [(repr(tokenizer.decode(tokens[at], special=True)), mask[at[0]]) for at in stretches]
    return " ".join(f"[learnt: {text}]" if learnt else text for text, learnt in texts)


def _tokenizer(
    args: argparse.Namespace, split_special_tokens: bool = True, prepend_bos: bool | None = False
) -> "TokenizerChoice":
    from megatron_noloco.data.tokenizer import TokenizerChoice, choice_problem

    choice = TokenizerChoice(args.tokenizer_model, split_special_tokens, prepend_bos)
    if problem := choice_problem(args.tokenizer_type, choice):
        raise UserError(problem)
    return choice
