"""Make a dataset with a name of its own, `PREFIX_KEY_document.{bin,idx}`, which Megatron-LM reads, too."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_noloco.data.cache import write_named
from megatron_noloco.data.encode import check_lost
from megatron_noloco.data.inputs import check_outside, find_inputs
from megatron_noloco.data.kinds import Documents
from megatron_noloco.data.sources import Split, TextSource
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError


def preprocess(
    inputs: Sequence[str],
    prefix: Path,
    tokenizer: Tokenizer,
    key: str = "text",
    append_eod: bool = False,
    max_lost: float = 0.05,
) -> tuple[Path, dict[str, Any]]:
    """Make a dataset; return its own prefix, and facts about it, see `Counts.facts`.

    Raises UserError for an input that cannot be read, and where the dataset exists or cannot be written.

    Args:
        inputs: paths of files and folders.
        prefix: path of the dataset, without the key.
        key: of JSON lines, or the column of a table.
        append_eod: whether each document ends with the end-of-document token.
        max_lost: share of the characters that the tokenizer may lose.
    """
    if not prefix.name:
        raise UserError(f"--output-prefix {prefix}: names no file; give one such as data/corpus")
    if "/" in key:
        raise UserError(f'--json-keys {key}: is a part of the name of a file, which cannot have "/"')
    source = TextSource(", ".join(inputs), Split(1, 0, 0), option="--input")
    kind = Documents(source, tokenizer, find_inputs(inputs, source.option))
    kind.key, kind.append_eod = key, append_eod
    for folder in {item.folder for item in kind.inputs.files if item.folder is not None}:
        check_outside({"--output-prefix": prefix}, folder, source.option)

    def check(facts: dict[str, Any]) -> None:
        check_lost(facts, max_lost, source.option, "--max-lost-characters")

    output = prefix.with_name(f"{prefix.name}_{key}_document")
    return output, write_named(output, kind.recipe._replace(option="--output-prefix"), check)
