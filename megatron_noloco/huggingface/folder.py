"""The files of a Hugging Face folder: its JSON and its safetensors, read one tensor at a time."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor


class HuggingFaceWeights:
    """Reads single tensors from a folder of safetensors, memory-mapped; use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._where = _find_tensors(folder)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "HuggingFaceWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, name: str) -> Tensor:
        """Raises ValueError when the tensor or its file is missing, or cannot be read."""
        file = self._file(name)
        try:
            return file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self._path(name)}: {error}") from None

    def check(self, name: str, shape: list[int]) -> None:
        """Raises ValueError unless the tensor is there, of this shape, and holds plain floating-point numbers."""
        file = self._file(name)
        try:
            header = file.get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{self._path(name)}: {error}") from None
        if header.get_dtype() not in ("F32", "BF16", "F16"):
            raise ValueError(
                f"{self._path(name)}: {name} is {header.get_dtype()}; "
                "weights must be F32, BF16 or F16, not quantized"
            )
        if header.get_shape() != shape:
            raise ValueError(f"{self._path(name)}: {name} is {header.get_shape()}, not {shape}")

    def _path(self, name: str) -> Path:
        return self.folder / self._where[name]

    def _file(self, name: str) -> Any:
        if name not in self._where:
            raise ValueError(f"{self.folder}: no tensor {name}")
        path = self._path(name)
        if path.name not in self._open:
            try:
                self._open[path.name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: {error}") from None
        return self._open[path.name]


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
