"""Settings of a run's data: its source, split, blend and tokenizer. No data are read."""

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from megatron_noloco.errors import UserError
from megatron_noloco.plans.sample_order import slots_of


def _weights(parts: Sequence[str | float]) -> list[float]:
    """Return the parts as numbers; none where a part is no number."""
    try:
        return [float(part) for part in parts]
    except ValueError:
        return []


@dataclass(frozen=True)
class Split:
    """Shares of training, validation and test, adding up to 1."""

    train: float
    validation: float
    test: float

    @classmethod
    def parse(cls, text: str) -> "Split":
        """Parse Megatron's "949,50,1": weights >= 0, the first > 0, missing ones zero. Raises UserError."""
        weights = _weights(text.split(","))
        if not 1 <= len(weights) <= 3 or not all(0 <= w < math.inf for w in weights) or weights[0] == 0:
            raise UserError(
                "must be up to three weights >= 0 for train, validation and test, the first > 0, "
                f'such as "949,50,1", got {text!r}'
            )
        weights += [0.0] * (3 - len(weights))
        return cls(*(weight / sum(weights) for weight in weights))

    def bounds(self, number: int) -> list[int]:
        """Return where each part of `number` sequences or records begins, and where the last one ends.

        Rounded as in Megatron.
        """
        return [0, *(round(share * number) for share in accumulate((self.train, self.validation))), number]


STANDARD_LIBRARY = "python-stdlib"  # in place of a path: the sources of Python's standard library here


Prefixes = tuple[tuple[str, float | None], ...]
"""Prefixes of indexed datasets, each with its share, which add up to 1; None: in proportion to their tokens."""


def parse_prefixes(paths: str | Sequence[str | float]) -> Prefixes:
    """Parse one prefix, a list of prefixes, or ["0.3", "prefixA", "0.7", "prefixB"], as Megatron does.

    Raises UserError, also for a list that can be read both ways: a prefix may be a number, such as that of a year.
    """
    if isinstance(paths, str):
        paths = [paths]
    names = [path for path in paths if isinstance(path, str) and path]
    weights = _weights(paths[::2]) if len(paths) % 2 == 0 else []
    if not weights and names and len(names) == len(paths):
        return tuple((name, None if len(names) > 1 else 1.0) for name in names)
    prefixes = [prefix for prefix in paths[1::2] if isinstance(prefix, str) and prefix]
    positive = all(0 < weight < math.inf for weight in weights)
    if not weights or len(weights) != len(prefixes) or not positive:
        raise UserError(
            "must be prefixes, or weights > 0 and prefixes in turn, like "
            f'["0.3", "prefixA", "0.7", "prefixB"], got {paths!r}'
        )
    a_weight_exists = any(Path(f"{weight}.idx").exists() for weight in paths[::2])
    if len(names) == len(paths) and (_weights(prefixes) or a_weight_exists):
        numbers = [int(weight) if weight.is_integer() else weight for weight in weights]
        weighted = [item for pair in zip(numbers, prefixes, strict=True) for item in pair]
        raise UserError(
            f"can be read as weights and datasets, then write {json.dumps(weighted)}, and as datasets alone, then "
            f"write {json.dumps([f'./{name}' for name in names])}; got {json.dumps(paths)}"
        )
    shares = [weight / sum(weights) for weight in weights]
    slots_of(shares)  # raises where these cannot be met
    return tuple(zip(prefixes, shares, strict=True))


@dataclass(frozen=True)
class TextSource:
    """A file or folder of text, or "python-stdlib"."""

    path: str
    split: Split | None = None  # None: it is read whole
    cache: str | None = None  # the folder of its dataset; None: the user's cache folder
    max_lost: float = 0.05  # share of the characters that the tokenizer may lose
    option: str = "data.text"  # which names the path

    @property
    def name(self) -> str:
        """Name for the user; the standard library differs between versions of Python."""
        return f"{self.path} {platform.python_version()}" if self.path == STANDARD_LIBRARY else self.path


@dataclass(frozen=True)
class IndexedSource:
    """Megatron's indexed datasets: one blend cut by `split`, or a blend each for training and validation."""

    train: Prefixes
    validation: Prefixes | None  # None: not given; with `split` it is the same blend as `train`
    split: Split | None  # None: `train` and `validation` are read whole


@dataclass(frozen=True)
class RecordSource(TextSource):
    """Rows for supervised fine-tuning: a file or a folder of them, whose records are cut by `split`."""

    option: str = "data.sft_data_path"
    packed: bool = True  # several records in one sample, as separate documents


Source = TextSource | IndexedSource


@dataclass(frozen=True)
class Needs:
    """What a run requires of its datasets; `vocab_size` and `seq_length` are enough to evaluate on other data."""

    vocab_size: int  # of the model, without padding; it may be more than the tokenizer's
    seq_length: int
    global_batch: int = 1  # training samples that a local step of all replicas consumes
    seed: int = 0  # shuffles the sequences of an indexed dataset (see `ShuffledSamples`)
    evaluates: bool = True  # whether validation datasets are built
    steps: int = 0  # local steps of the run, for its epochs; 0: not known
    end_of_document: int = -1  # the token that ends each document, where one of these is set, as in Megatron:
    reset_attention_mask: bool = False  # documents in a sample do not attend to each other
    eod_mask_loss: bool = False  # the token after an end has no loss
