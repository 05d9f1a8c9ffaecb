"""Text to Megatron's indexed datasets, PREFIX_KEY_document.{bin,idx}.

    python tools/preprocess_data.py --input corpus.jsonl.zst --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/tokenizer --append-eod --workers 8

Inputs are JSON lines (.jsonl, .json, .ndjson: one document per line), Parquet (.parquet: one per row) and text
(anything else: one per file), the first and the last also as .gz or .zst; folders are searched. Stopped, it goes
on where it was when started again with the same arguments.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_noloco.preprocess.encode import Encoding
from megatron_noloco.preprocess.inputs import find_inputs
from megatron_noloco.preprocess.preprocess import Job, check, preprocess


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help="files or folders")
    parser.add_argument("--output-prefix", required=True, type=Path, help="path without suffix")
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys (Parquet: columns) that hold text; a dataset each",
    )
    parser.add_argument("--tokenizer-type", choices=("byte", "HuggingFaceTokenizer"), default="byte")
    parser.add_argument("--tokenizer-model", help="folder with a tokenizer.json")
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with a token that says so"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that encode")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what is parallel
    encoding = Encoding(
        options.tokenizer_type, options.tokenizer_model, tuple(options.json_keys), options.append_eod
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's notice is a Ctrl-C
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        job = Job(find_inputs(options.input), options.output_prefix, encoding, options.workers)
        check(job)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("preprocess", total=sum(item.bytes for item in job.inputs))
            tally = preprocess(job, lambda read_bytes: progress.advance(task, read_bytes))
    except (ValueError, OSError) as error:  # a file that cannot be read, a disk that is full
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on after the last finished part", file=sys.stderr)
        return 130
    left_out = [f"{tally.empty} empty documents"] * bool(tally.empty)
    left_out += [f"{tally.not_text} files that are not UTF-8 text"] * bool(tally.not_text)
    notes = f"; left out: {', '.join(left_out)}" if left_out else ""
    print(f"{tally.documents} documents, {tally.tokens} tokens{notes}")
    for key in encoding.json_keys:
        print(f"{job.output(key)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
