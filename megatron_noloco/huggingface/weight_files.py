"""The weight files of a Hugging Face folder: which they are, and which tensors each holds."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_noloco.files import read_object

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_NAME = re.compile(r"model(-(\d+)-of-(\d+))?\.safetensors")
_OTHER_FORMATS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# What a model computes itself, and early versions of transformers wrote nevertheless.
_BUFFER = re.compile(r"(^|\.)rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")


class WeightFiles:
    """All tensors of a Hugging Face folder, from the files `model*.safetensors`. Call `close` in the end.

    The files say what they hold; an index must say the same. Buffers that a model computes itself are left out.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files and read their headers.

        Raises ValueError, in one line, when files are missing, damaged, or of more than one model.
        """
        self.folder = folder
        self._files: dict[str, tuple[Path, Any]] = {}  # of each tensor: its path, and the open file
        if (folder / "adapter_config.json").exists():
            raise ValueError(
                f"{folder / 'adapter_config.json'}: an adapter beside the model; merge it (merge_and_unload of "
                "peft), or remove it"
            )
        listed = _read_index(folder / INDEX)
        with ExitStack() as stack:
            for path in _choose(folder, listed):
                self._open(path, stack)
            if listed is not None:
                self._compare(listed)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return sorted(self._files)

    def path(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._files[name][0]

    def slice(self, name: str) -> Any:
        """Return a tensor unread: safetensors' slice, with `get_shape`, `get_dtype` and indexing."""
        return self._files[name][1].get_slice(name)

    def _open(self, path: Path, stack: ExitStack) -> None:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: cut short, or no safetensors file ({error}); copy it again") from None
        for name in file.keys():  # noqa: SIM118, not a dict
            if name in self._files:
                raise ValueError(f"{path}: {name} is in {self.path(name).name}, too; remove one of the files")
            if not _BUFFER.search(name):
                self._files[name] = (path, file)

    def _compare(self, listed: dict[str, str]) -> None:
        """Raise ValueError unless the index says what the files hold."""
        held = {name: str(path.relative_to(self.folder)) for name, (path, _) in self._files.items()}
        said = {name: file for name, file in listed.items() if not _BUFFER.search(name)}
        for name in sorted(held.keys() | said.keys()):
            if held.get(name) != said.get(name):
                raise ValueError(
                    f"{self.folder / INDEX}: {name} is listed in {said.get(name, 'no file')}, but is in "
                    f"{held.get(name, 'none of the files')}; without an index the files themselves are asked"
                )


def _choose(folder: Path, listed: dict[str, str] | None) -> list[Path]:
    """Return the files of the model; raises ValueError where one is missing, or one of another model is there."""
    there = {path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)}
    if not there and listed is None:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_FORMATS)
        what = f"{others[0]} is not read; " if others else ""
        raise ValueError(
            f"{folder / SINGLE}: missing; {what}weights must be safetensors, which "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other) writes"
        )
    first = INDEX if listed is not None else min(there)
    wanted = _shards(first) if listed is None else set(listed.values())
    missing = sorted(name for name in wanted if not (folder / name).exists())
    if missing:
        raise ValueError(f"{folder / missing[0]}: missing, though {first} is there and needs it")
    if extra := sorted(there - wanted):
        raise ValueError(f"{folder / extra[0]}: not a part of the model of {first} beside it; remove either")
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
    """Return the name of each tensor's file, from the index; None without one. Raises ValueError."""
    if not path.exists():
        return None
    listed = read_object(path, "remove it, or write it again").get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ValueError(f"{path}: no weight_map, an object of file names")
    return listed
