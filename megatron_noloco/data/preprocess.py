"""Make an indexed dataset with a name of its own: `data preprocess`.

A dataset gets its name, `PREFIX_KEY_document.{bin,idx}`, when it is complete: a run that was stopped is run again.
`PREFIX_KEY_document.tokenizer.sha256` tells its tokenizer from others.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megatron_noloco.data.auto_tokenizer import check_folder
from megatron_noloco.data.encode import Counts, encode, notes_of, read_documents
from megatron_noloco.data.formats import Advance
from megatron_noloco.data.indexed import IndexedWriter
from megatron_noloco.data.inputs import Inputs, check_outside
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import writing


@dataclass(frozen=True)
class Job:
    """What one command preprocesses: inputs, output and settings."""

    inputs: Inputs
    prefix: Path
    tokenizer: Tokenizer
    json_keys: Sequence[str]
    append_eod: bool

    @property
    def bytes(self) -> int:
        """Bytes that are read: the inputs once for each key."""
        return len(self.json_keys) * sum(item.bytes for item in self.inputs.files)

    def output(self, key: str) -> Path:
        """Return the prefix of the finished dataset of `key`."""
        return self.prefix.with_name(f"{self.prefix.name}_{key}_document")


def check(job: Job) -> None:
    """Raise UserError when a job cannot be carried out; nothing is written."""
    if not job.prefix.name:
        raise UserError(f"--output-prefix {job.prefix}: names no file; give one such as data/corpus")
    if not any(item.bytes for item in job.inputs.files):
        raise UserError("--input: holds no files with text")
    for place, key in enumerate(job.json_keys):
        if key in job.json_keys[:place]:
            raise UserError(f"--json-keys {key}: is given more than once; give each key once")
        if "/" in key:
            raise UserError(
                f'--json-keys {key}: its dataset would be a file with this name, which cannot have "/"'
            )
    text = next((item.path for item in job.inputs.files if item.kind == "text"), None)
    if text is not None and len(job.json_keys) > 1:
        raise UserError(f"--json-keys: {text} is plain text, which has no keys; give one key, or JSON lines")
    for folder in {item.folder for item in job.inputs.files if item.folder is not None}:
        check_outside({"--output-prefix": job.prefix}, folder, "--input")
    check_folder(job.tokenizer)


def preprocess(job: Job, advance: Advance) -> Counts:
    """Carry out a job that passed `check`; return counts of all keys together.

    Raises UserError for an input that cannot be read, and for a dataset that exists or is being written. The
    inputs are read once for each key.
    """
    counts, tokenizer = Counts(advance), job.tokenizer
    with ExitStack() as stack:
        with writing(job.prefix, "--output-prefix"):
            job.prefix.parent.mkdir(parents=True, exist_ok=True)
            writers = {
                key: stack.enter_context(IndexedWriter(job.output(key), tokenizer.vocab_size))
                for key in job.json_keys
            }
        for key, writer in writers.items():
            pieces = read_documents(job.inputs.files, key, counts)
            for sequence in encode(pieces, tokenizer, job.append_eod, counts):
                writer.add(*sequence)
        if not counts["documents"]:
            raise UserError(f"nothing was written{notes_of(counts, '')}")
        for writer in writers.values():
            writer.finish(tokenizer)
    return counts
