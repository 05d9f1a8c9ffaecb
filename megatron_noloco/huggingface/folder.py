"""A Hugging Face folder: its architecture from config.json, its weights from safetensors, one tensor at a time."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import architecture_of, table_of


def read_architecture(folder: Path) -> Architecture:
    """What the folder's config describes; raises ValueError, in one line, where no model of ours can be that."""
    theirs = read_config(folder)
    try:
        return architecture_of(theirs)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; raises ValueError."""
    return read_object(folder / "config.json", "give the folder of a Hugging Face model")


class PretrainedWeights:
    """The weights of a folder as parameters of an architecture, memory-mapped; use as a context manager."""

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self.folder = folder
        self._table = table_of(architecture)
        self._where = _find_tensors(folder)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "PretrainedWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, name: str) -> Tensor:
        """The full parameter of that name in the unsplit model, in the folder's precision.

        Raises ValueError when a tensor or its file is missing, or cannot be read.
        """
        return self._table.find(name).from_hf(self._tensor)

    def check(self) -> None:
        """Raise ValueError unless all tensors are there, of their shapes, in plain floating-point numbers.

        Reads the headers of the files only.
        """
        for parameter in self._table:
            for name, shape in parameter.hf_shapes.items():
                self._check(name, list(shape))

    def _check(self, name: str, shape: list[int]) -> None:
        header = self._get(name, "get_slice")
        if header.get_dtype() not in ("F32", "BF16", "F16"):
            raise ValueError(
                f"{self._path(name)}: {name} is {header.get_dtype()}; "
                "weights must be F32, BF16 or F16, not quantized"
            )
        if header.get_shape() != shape:
            raise ValueError(f"{self._path(name)}: {name} is {header.get_shape()}, not {shape}")

    def _tensor(self, name: str) -> Tensor:
        return self._get(name, "get_tensor")

    def _get(self, name: str, how: str) -> Any:
        if name not in self._where:
            raise ValueError(f"{self.folder}: no tensor {name}")
        path = self._path(name)
        try:
            if path.name not in self._open:
                self._open[path.name] = self._stack.enter_context(safe_open(path, framework="pt"))
            return getattr(self._open[path.name], how)(name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: {error}") from None

    def _path(self, name: str) -> Path:
        return self.folder / self._where[name]


def _find_tensors(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or the single file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        where = read_object(index, "weights must be safetensors").get("weight_map")
        if not isinstance(where, dict):
            raise ValueError(f"{index}: no weight_map")
        missing = sorted({file for file in where.values() if not (folder / file).exists()})
        if missing:
            raise ValueError(f"{folder / missing[0]}: missing, though {index.name} lists it")
        return where
    if not single.exists():
        raise ValueError(f"{single}: missing; weights must be safetensors")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{single}: {error}") from None


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """The JSON object in a file; raises ValueError."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {advice}") from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object; {advice}")
    return content
