"""Make a dataset with a name of its own, `PREFIX_KEY_document.{bin,idx}`, which Megatron-LM reads, too."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_noloco.data.cache import write_named
from megatron_noloco.data.encode import check_lost
from megatron_noloco.data.inputs import check_outside, find_inputs
from megatron_noloco.data.kinds import Documents
from megatron_noloco.data.sources import Split, TextSource
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError


@dataclass(frozen=True)
class Job:
    """What one command preprocesses.

    Attributes:
        inputs: paths of files and folders.
        prefix: path of the dataset, without the key.
        key: of JSON lines, or the column of a table.
        append_eod: whether each document ends with the end-of-document token.
        max_lost: share of the characters that the tokenizer may lose.
    """

    inputs: Sequence[str]
    prefix: Path
    tokenizer: Tokenizer
    key: str = "text"
    append_eod: bool = False
    max_lost: float = 0.05

    @property
    def output(self) -> Path:
        """The prefix of the finished dataset."""
        return self.prefix.with_name(f"{self.prefix.name}_{self.key}_document")


def preprocess(job: Job) -> dict[str, Any]:
    """Make the dataset of a job; return facts about it, see `Counts.facts`.

    Raises UserError for an input that cannot be read, and where the dataset exists or cannot be written.
    """
    if not job.prefix.name:
        raise UserError(f"--output-prefix {job.prefix}: names no file; give one such as data/corpus")
    if "/" in job.key:
        raise UserError(f'--json-keys {job.key}: is a part of the name of a file, which cannot have "/"')
    source = TextSource(", ".join(job.inputs), Split(1, 0, 0), option="--input")
    kind = Documents(source, job.tokenizer, find_inputs(job.inputs, source.option))
    kind.key, kind.append_eod = job.key, job.append_eod
    for folder in {item.folder for item in kind.inputs.files if item.folder is not None}:
        check_outside({"--output-prefix": job.prefix}, folder, source.option)

    def check(facts: dict[str, Any]) -> None:
        check_lost(facts, job.max_lost, source.option, "--max-lost-characters")

    return write_named(job.output, kind.recipe._replace(option="--output-prefix"), check)
