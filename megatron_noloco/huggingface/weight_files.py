"""The weights of a Hugging Face folder: which files and tensors there are, and what they are of a model."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_noloco.errors import UserError
from megatron_noloco.files import read_object
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import HEAD, Index, Stored, stored_tensors, table_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_NAME = re.compile(r"model(-(\d+)-of-(\d+))?\.safetensors")
_OTHER_FORMATS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# What a model computes itself, and early versions of transformers wrote nevertheless.
_BUFFER = re.compile(r"(^|\.)rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")


class _Held(NamedTuple):
    """A tensor in a file that is open."""

    path: Path
    file: Any  # of safetensors
    name: str

    @property
    def slice(self) -> Any:
        """The tensor unread: safetensors' slice, with `get_shape`, `get_dtype` and indexing."""
        return self.file.get_slice(self.name)


class NotFiniteWeightError(UserError):
    """A weight of a Hugging Face folder is NaN or infinite."""


class PretrainedWeights:
    """The weights of a Hugging Face folder as parameters of an architecture; a context manager.

    Every tensor of the folder is accounted for: it is one of the model's, or several of them stacked, or the same
    once more. So a run, `import`, `evaluate` and `generate` read the whole folder, and the same from it.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        """Open the files; only their headers are read, and tensors that are there twice.

        Raises UserError, in one line, unless all tensors of the model are there, and nothing else, with the right
        shapes, in floating-point numbers.
        """
        self.folder = folder
        self._architecture, self._table = architecture, table_of(architecture)
        # Of each of the table's tensors: the stored tensor that holds it, and where in that
        self._places: dict[str, tuple[str, Index]] = {}
        with ExitStack() as stack:
            self._held = _open(folder, stack)
            self._account()
            self._stack = stack.pop_all()

    def __enter__(self) -> "PretrainedWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def __call__(self, name: str) -> Tensor:
        """Return the full parameter of that name in the unsplit model, in the folder's precision.

        Raises NotFiniteWeightError, as all methods that read tensors.
        """
        return self._table.find(name).from_hf(self._read)

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return all tensors under the names of the table, which every version of transformers loads."""
        return {name: self._read(name) for name in self._places}

    def check_finite(self) -> None:
        """Read every tensor once; raises NotFiniteWeightError."""
        for name in self._places:
            self._read(name)

    def _read(self, name: str) -> Tensor:
        stored, index = self._places[name]
        tensor: Tensor = self._held[stored].slice[index]
        if not torch.isfinite(tensor).all():
            raise NotFiniteWeightError(
                f"{self._held[stored].path}: {stored} holds NaN or infinite weights: the file is damaged, or the "
                "model has diverged; give another copy"
            )
        return tensor

    def _account(self) -> None:
        """Find the place of every tensor of the table; raises UserError."""
        known, unknown = stored_tensors(self._architecture), []
        for name in sorted(self._held):
            if name in known:
                self._add(name, known[name])
            else:
                unknown.append(name)
        needed = [name for parameter in self._table for name in parameter.hf]
        missing = [name for name in needed if name not in self._places]
        problems = [f"no tensor {_some(missing)}"] if missing else []
        if missing == [HEAD]:
            problems.append(
                "tie_word_embeddings is false in config.json, and must be true if the embedding is the head"
            )
        if unknown:
            family, layers = self._architecture.family, self._architecture.num_layers
            problems.append(
                f"tensors that the {family} of {layers} layers in config.json does not have: {_some(unknown)}"
            )
            problems.append("model_type or num_hidden_layers there does not fit them")
            if not missing:
                problems.append(
                    "only if they are of no use, let AutoModelForCausalLM.from_pretrained(folder)"
                    ".save_pretrained(other) leave them out"
                )
        if problems:
            raise UserError(f"{self.folder}: {'; '.join(problems)}")

    def _add(self, name: str, stored: Stored) -> None:
        """Check a tensor's header, and note where the tensors of the table are in it; raises UserError."""
        header = self._held[name].slice
        where, dtype, found = f"{self._held[name].path}: {name}", header.get_dtype(), header.get_shape()
        if dtype not in ("F32", "BF16", "F16"):
            raise UserError(f"{where} is {dtype}; weights must be F32, BF16 or F16, not quantized")
        if found != list(stored.shape):
            raise UserError(f"{where} is {found}, not {list(stored.shape)}")
        for part, index in stored.parts.items():
            other, at = self._places.setdefault(part, (name, index))
            if other != name and not torch.equal(header[index].float(), self._held[other].slice[at].float()):
                why = "; set tie_word_embeddings to false in config.json if the head has weights of its own"
                raise UserError(
                    f"{where} differs from {other}, but the two are the same tensor of this model"
                    f"{why if HEAD in (name, other) else ''}"
                )


# The files


def _open(folder: Path, stack: ExitStack) -> dict[str, _Held]:
    """Open the files `model*.safetensors`, read their headers, and return all tensors by name.

    The files say what they hold; an index must say the same. Buffers that a model computes itself are left out.
    Raises UserError, in one line, when files are missing, damaged, or of more than one model.
    """
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder / 'adapter_config.json'}: an adapter beside the model; merge it (merge_and_unload of "
            "peft), or remove it"
        )
    listed, held = _read_index(folder / INDEX), dict[str, _Held]()
    for path in _choose(folder, listed):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cut short, or no safetensors file ({error}); copy it again") from None
        for name in file.keys():  # noqa: SIM118, not a dict
            if name in held:
                raise UserError(f"{path}: {name} is in {held[name].path.name}, too; remove one of the files")
            if not _BUFFER.search(name):
                held[name] = _Held(path, file, name)
    if listed is not None:
        _compare(listed, held, folder)
    return held


def _compare(listed: dict[str, str], held: dict[str, _Held], folder: Path) -> None:
    """Raise UserError unless the index says what the files hold."""
    there = {name: str(tensor.path.relative_to(folder)) for name, tensor in held.items()}
    said = {name: file for name, file in listed.items() if not _BUFFER.search(name)}
    for name in sorted(there.keys() | said.keys()):
        if there.get(name) != said.get(name):
            raise UserError(
                f"{folder / INDEX}: {name} is listed in {said.get(name, 'no file')}, but is in "
                f"{there.get(name, 'none of the files')}; without an index the files themselves are asked"
            )


def _choose(folder: Path, listed: dict[str, str] | None) -> list[Path]:
    """Return the files of the model; raises UserError where one is missing, or one of another model is there."""
    there = {path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)}
    if not there and listed is None:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_FORMATS)
        what = f"{others[0]} is not read; " if others else ""
        raise UserError(
            f"{folder / SINGLE}: missing; {what}weights must be safetensors, which "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other) writes"
        )
    first = INDEX if listed is not None else min(there)
    wanted = _shards(first) if listed is None else set(listed.values())
    missing = sorted(name for name in wanted if not (folder / name).exists())
    if missing:
        raise UserError(f"{folder / missing[0]}: missing, though {first} is there and needs it")
    if extra := sorted(there - wanted):
        raise UserError(f"{folder / extra[0]}: not a part of the model of {first} beside it; remove either")
    return [folder / name for name in sorted(wanted)]


def _shards(name: str) -> set[str]:
    """Return the names of all files of a model from one, such as model-00002-of-00003.safetensors."""
    match = _NAME.fullmatch(name)
    assert match is not None
    _, number, count = match.groups()
    if count is None:
        return {name}
    return {f"model-{n:0{len(number)}d}-of-{count}.safetensors" for n in range(1, int(count) + 1)}


def _read_index(path: Path) -> dict[str, str] | None:
    """Return the name of each tensor's file, from the index; None without one. Raises UserError."""
    if not path.exists():
        return None
    listed = read_object(path, "remove it, or write it again").get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise UserError(f"{path}: no weight_map, an object of file names")
    return listed


def _some(names: Sequence[str]) -> str:
    """Return up to three of the names, and how many there are besides."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
