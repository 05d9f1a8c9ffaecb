"""What a text, or records for fine-tuning, become: a dataset of Megatron, in the cache or with a name."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_noloco.data.cache import Entry, Recipe, cache_folder, find_entry, obtain, write_named
from megatron_noloco.data.encode import Counts, Sequence, check_lost, encode, read_documents
from megatron_noloco.data.formats import Advance
from megatron_noloco.data.indexed import IndexedWriter
from megatron_noloco.data.inputs import Inputs, check_outside, find_inputs, find_standard_library
from megatron_noloco.data.records import encode_records, find_records
from megatron_noloco.data.sources import STANDARD_LIBRARY, RecordSource, Split, TextSource
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import check_writable


@dataclass(frozen=True)
class Corpus:
    """A text or records, their files, and what decides their tokens.

    Attributes:
        key: of JSON lines that hold documents, or the column of a table.
        append_eod: whether a document ends with the tokenizer's end-of-document token.
    """

    source: TextSource
    tokenizer: Tokenizer
    inputs: Inputs
    key: str = "text"
    append_eod: bool = True

    @property
    def _kind(self) -> str:
        return "Records" if isinstance(self.source, RecordSource) else "Documents"

    @property
    def recipe(self) -> Recipe:
        """What the dataset is made of."""
        tokenizer, of_template = self.tokenizer, self._kind == "Records"
        settings: dict[str, Any] = {
            "kind": [self._kind, self.key, self.append_eod],
            "tokenizer": [tokenizer.digest, tokenizer.files_digest if of_template else ""],
            "special tokens": [tokenizer.splits_special_tokens, *tokenizer.before_document],
        }
        if of_template and (renderer := tokenizer.chat_template.renderer):
            settings["renderer"] = renderer
        return Recipe(self.source.path, self.inputs.files, settings, self._write)

    def make(self) -> Entry:
        """Return the dataset, from the cache or made now; raises UserError for what cannot be read."""
        return obtain(cache_folder(self.source.cache), self.recipe)

    def check(self, output_dir: Path) -> None:
        """Raise UserError if nothing can be read, or what the run writes would be read; nothing is written."""
        if not any(item.bytes for item in self.inputs.files):
            raise self._empty()
        folder = cache_folder(self.source.cache)
        outputs = {"training.output_dir": output_dir, "data.cache": folder}
        check_outside(outputs, Path(self.source.path), self.source.option)
        if find_entry(folder, self.recipe.digest) is None:
            check_writable(folder, "data.cache")

    def check_first(self) -> None:
        """Read and encode the first rows, unless the dataset is there; raises UserError where that fails."""
        if self.inputs.files and find_entry(cache_folder(self.source.cache), self.recipe.digest) is None:
            next(iter(self._sequences(Counts(lambda _: None))), None)

    def _sequences(self, counts: Counts) -> Iterable[Sequence]:
        """Yield the sequences of the dataset; counts what they hold."""
        if self._kind == "Records":
            return encode_records(self.inputs.files, self.tokenizer, counts)
        pieces = read_documents(self.inputs.files, self.key, counts)
        return encode(pieces, self.tokenizer, self.append_eod, counts)

    def _write(self, prefix: Path, advance: Advance) -> dict[str, Any]:
        """Write the dataset under a prefix; return facts about it."""
        counts = Counts(advance)
        with IndexedWriter(prefix, self.tokenizer.vocab_size, masked=self._kind == "Records") as writer:
            for sequence in self._sequences(counts):
                writer.add(*sequence)
            facts = counts.facts(self.tokenizer, self.inputs.notes)
            if not len(writer):
                raise self._empty(facts["notes"])
            writer.finish()
        return {"tokenizer": self.tokenizer.digest, **facts}

    def _empty(self, notes: str = "") -> UserError:
        """Return the error for files that hold nothing; `notes`: what is left out."""
        return UserError(f"{self.source.option}: no {self._kind.lower()} in {self.source.path}{notes}")


def corpus_of(source: TextSource, tokenizer: Tokenizer) -> Corpus:
    """Return what a source holds; raises UserError if there are no files."""
    if isinstance(source, RecordSource):
        return Corpus(source, tokenizer, find_records(source.path, source.option))
    is_library = source.path == STANDARD_LIBRARY
    inputs = find_standard_library() if is_library else find_inputs([source.path], source.option)
    return Corpus(source, tokenizer, inputs)


def preprocess(
    inputs: list[str],
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
        max_lost: share of the characters that the tokenizer may lose.
    """
    if not prefix.name:
        raise UserError(f"--output-prefix {prefix}: names no file; give one such as data/corpus")
    if "/" in key:
        raise UserError(f'--json-keys {key}: is a part of the name of a file, which cannot have "/"')
    source = TextSource(", ".join(inputs), Split(1, 0, 0), option="--input")
    corpus = Corpus(source, tokenizer, find_inputs(inputs, source.option), key, append_eod)
    for folder in {item.folder for item in corpus.inputs.files if item.folder is not None}:
        check_outside({"--output-prefix": prefix}, folder, source.option)

    check = partial(check_lost, most=max_lost, source=source.option, option="--max-lost-characters")
    output = prefix.with_name(f"{prefix.name}_{key}_document")
    return output, write_named(output, corpus.recipe._replace(option="--output-prefix"), check)
