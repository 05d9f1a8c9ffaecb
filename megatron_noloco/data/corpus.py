"""What a text, or records for fine-tuning, become: a dataset of Megatron, in the cache or with a name."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_noloco.data.cache import Entry, Made, Recipe, cache_folder, find_entry, obtain, write_named
from megatron_noloco.data.encode import Counts, encode, files_to_read, read_documents
from megatron_noloco.data.formats import Advance, Input
from megatron_noloco.data.indexed import IndexedDataset, Sequence, open_indexed, write_indexed
from megatron_noloco.data.inputs import check_outside, find_inputs
from megatron_noloco.data.records import RECORD_KEYS, encode_records, is_record
from megatron_noloco.data.sources import RecordSource, TextSource
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import check_writable, sha256_of


@dataclass(frozen=True)
class Corpus:
    """A text or records, their files, and what decides their tokens.

    Attributes:
        key: of JSON lines that hold documents, or the column of a table.
        append_eod: whether a document ends with the tokenizer's end-of-document token.
    """

    source: TextSource
    tokenizer: Tokenizer
    inputs: list[Input]
    key: str = "text"
    append_eod: bool = True

    @property
    def _of_records(self) -> bool:
        return isinstance(self.source, RecordSource)

    @property
    def recipe(self) -> Recipe:
        """What the dataset is made of."""
        tokenizer, kind = self.tokenizer, "Records" if self._of_records else "Documents"
        settings: dict[str, Any] = {
            "kind": [kind, self.key, self.append_eod],
            "tokenizer": [tokenizer.digest, sha256_of(tokenizer.content) if self._of_records else ""],
            "special tokens": [tokenizer.splits_special_tokens, *tokenizer.before_document],
        }
        if self._of_records and (renderer := tokenizer.chat_template.renderer):
            settings["renderer"] = renderer
        return Recipe(self.source.path, self.inputs, settings, self._write)

    def make(self) -> Entry:
        """Return the dataset in the cache, where it is made if it is not there.

        Raises UserError for what cannot be read, and where the tokenizer loses too many characters.
        """
        entry = obtain(cache_folder(self.source.cache), self.recipe)
        self.check_lost(entry.made)
        return entry

    def open(self) -> IndexedDataset:
        """Return the dataset, mapped; raises UserError as `make` does."""
        return open_indexed(self.make().prefix, self.tokenizer, self.source.name)

    def check(self, output_dir: Path) -> None:
        """Raise UserError if what the run writes would be read, or the cache cannot be written."""
        folder = cache_folder(self.source.cache)
        outputs = {"training.output_dir": output_dir, "data.cache": folder}
        check_outside(outputs, self.inputs, self.source.option)
        if not self._is_made:
            check_writable(folder, "data.cache")

    def check_first(self) -> None:
        """Read and encode the first rows, unless the dataset is there; raises UserError if there are none."""
        counts = Counts(lambda _: None)
        if not self._is_made and next(self._sequences(counts), None) is None:
            raise self._empty(counts)

    @property
    def _is_made(self) -> bool:
        return find_entry(cache_folder(self.source.cache), self.recipe.digest) is not None

    def _sequences(self, counts: Counts) -> Iterator[Sequence]:
        """Yield the sequences of the dataset; counts what they hold."""
        keys = RECORD_KEYS if self._of_records else [self.key]
        files = files_to_read(self.inputs, keys, counts, rows_alone=self._of_records)
        if self._of_records:
            return encode_records(files, self.tokenizer, counts)
        pieces = read_documents(files, sum(item.bytes for item in self.inputs), self.key, counts)
        return encode(pieces, self.tokenizer, self.append_eod, counts)

    def _write(self, folder: Path, advance: Advance) -> Made:
        """Write the dataset, which is that of an `Entry`."""
        counts, vocab_size = Counts(advance), self.tokenizer.vocab_size
        if not write_indexed(folder / "data", self._sequences(counts), vocab_size, masked=self._of_records):
            raise self._empty(counts)
        return counts.made(self.source.path, self.tokenizer)

    def check_lost(self, made: Made) -> None:
        """Raise UserError where the tokenizer has lost too many characters."""
        if made.lost_share > self.source.max_lost:
            raise UserError(
                f"{self.source.option} {self.source.name}: no token stands for {made.lost}; give a tokenizer that "
                f"has them, or a higher max_lost_characters (now {self.source.max_lost:g})"
            )

    def _empty(self, counts: Counts) -> UserError:
        """Return the error for files that hold nothing, with what is left out."""
        what, made = "records" if self._of_records else "documents", counts.made("", self.tokenizer)
        return UserError(f"{self.source.option}: no {what} in {self.source.path}{made.notes}")


def corpus_of(source: TextSource, tokenizer: Tokenizer) -> Corpus:
    """Return what a source holds; raises UserError if there are no files."""
    return Corpus(source, tokenizer, find_inputs([source.path], source.option))


def corpus_of_any(path: str, tokenizer: Tokenizer, cache: str | None) -> Corpus:
    """Return all that a path holds: records, if the first row that is read there is one, else text.

    Raises UserError for a file that cannot be read.
    """
    inputs = find_inputs([path], "--data")
    tables = [item for item in inputs if item.kind != "text"]
    read = files_to_read(tables, ["text", *RECORD_KEYS], Counts(lambda _: None))
    first = next((row for item in read for _, row in item.rows(lambda _: None)), {})
    source = RecordSource if is_record(first) else TextSource
    return Corpus(source(path, cache=cache, max_lost=1.0, option="--data"), tokenizer, inputs)


def preprocess(
    inputs: list[str],
    prefix: Path,
    tokenizer: Tokenizer,
    key: str = "text",
    append_eod: bool = False,
    max_lost: float = 0.05,
) -> tuple[Path, Made]:
    """Make a dataset; return its own prefix, and what is known of it.

    Raises UserError for an input that cannot be read, and where the dataset exists or cannot be written.

    Args:
        inputs: paths of files and folders.
        prefix: path of the dataset, without the key.
        max_lost: share of the characters that the tokenizer may lose.
    """
    if not prefix.name:
        raise UserError(f"--output-prefix {prefix}: names no file, as data/corpus does")
    output = Path(f"{prefix}_{key}_document")
    source = TextSource(", ".join(inputs), max_lost=max_lost, option="--input")
    corpus = Corpus(source, tokenizer, find_inputs(inputs, source.option), key, append_eod)
    check_outside({"--output-prefix": prefix}, corpus.inputs, source.option)
    return output, write_named(output, corpus.recipe._replace(option="--output-prefix"), corpus.check_lost)
