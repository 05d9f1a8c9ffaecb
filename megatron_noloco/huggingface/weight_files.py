"""The weights of a Hugging Face folder, as parameters of an architecture."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_noloco.errors import UserError
from megatron_noloco.files import read_object
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import EMBEDDING, HEAD, table_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_BUFFER = "rotary_emb.inv_freq"  # which a model computes itself, and early versions of transformers wrote


class PretrainedWeights(ExitStack[None]):
    """The weights of a Hugging Face folder as parameters of an architecture; a context, which closes the files.

    Every tensor of the folder is one of the model's, so a run, `import` and `evaluate` read the same.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        """Open model.safetensors, or the files that its index lists; only their headers are read.

        Raises UserError, in one line, unless all tensors of the model are there, and nothing else, with the right
        shapes, in floating-point numbers.
        """
        super().__init__()
        self.folder = folder
        self._table = table_of(architecture)
        self._files = {
            name: file
            for path in _paths(folder)
            for file in [self.enter_context(_opened(path))]
            for name in file.keys()  # noqa: SIM118, not a dict
            if not name.endswith(_BUFFER)
        }
        self._check(architecture)

    def __call__(self, name: str) -> Tensor:
        """Return the full parameter of that name in the unsplit model, in the folder's precision.

        Raises UserError where it is not finite.
        """
        return self._table.find(name).from_hf(self._read)

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"{self.folder}: {name} holds NaN or infinite weights: a file is damaged, or the model has "
                "diverged; give another copy"
            )
        return tensor

    def _check(self, architecture: Architecture) -> None:
        """Compare names, shapes and types with the table; raises UserError."""
        shapes = {name: list(shape) for row in self._table for name, shape in row.hf_shapes.items()}
        unknown = sorted(self._files.keys() - shapes.keys())
        if unknown == [HEAD] and torch.equal(self._read(HEAD), self._read(EMBEDDING)):
            unknown = []  # a tied head, written twice
        missing = sorted(shapes.keys() - self._files.keys())
        problems = [f"no tensor {some_names(missing)}"] if missing else []
        if unknown:
            model = f"{architecture.family} of {architecture.num_layers} layers"
            problems.append(f"tensors that the {model} in config.json does not have: {some_names(unknown)}")
        if HEAD in (*missing, *unknown):
            problems.append(
                f"tie_word_embeddings is {str(architecture.tied_embeddings).lower()} in config.json"
            )
        for name, file in self._files.items():
            found, dtype = file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()
            if found != shapes.get(name, found):
                problems.append(f"{name} is {found}, not {shapes[name]}")
            if dtype not in ("F32", "BF16", "F16"):
                problems.append(f"{name} is {dtype}; weights must be F32, BF16 or F16, not quantized")
        if problems:
            raise UserError(f"{self.folder}: {'; '.join(problems[:3])}")


def _paths(folder: Path) -> list[Path]:
    """Return the files of the model; raises UserError."""
    if not (folder / INDEX).exists():
        return [folder / SINGLE]
    listed = read_object(folder / INDEX, "write it again").get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UserError(f"{folder / INDEX}: no weight_map, an object of file names")
    return [folder / name for name in sorted({*map(str, listed.values())})]


def _opened(path: Path) -> Any:
    """Open a file; raises UserError."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(
            f"{path}: missing; weights must be {SINGLE}, or files with the index {INDEX}, which "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other) writes (of an adapter, "
            "merge_and_unload of peft first)"
        ) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cut short, or no safetensors file ({error}); copy it again") from None


def some_names(names: Sequence[str]) -> str:
    """Return up to three of the names, and how many there are besides."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
