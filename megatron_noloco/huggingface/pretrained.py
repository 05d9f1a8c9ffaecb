"""Start a run from a Hugging Face folder: read its architecture, weights and tokenizer, and write a config."""

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_noloco.config import RunConfig
from megatron_noloco.data.auto_tokenizer import folder_adds_bos, sample_texts
from megatron_noloco.data.fast_tokenizer import FastTokenizer
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import architecture_of, families_with, family_of, table_of


def import_folder(folder: Path, template: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a run that starts from the folder: the template with the folder's model and tokenizer.

    No weights are copied. Raises ValueError, in one line, when no run can start from the folder.
    """
    before, architecture = RunConfig.from_dict(template), read_architecture(folder)
    dropout = _read_config(folder).get("attention_dropout")
    template_model = {
        name: value
        for name, value in template["model"].items()
        if not families_with(name) or architecture.family in families_with(name)
    }
    model = {
        **({"attention_dropout": dropout} if dropout else {}),  # the template may override it
        **template_model,
        **model_fields(architecture),
        "seq_length": before.model.seq_length,
        "make_vocab_size_divisible_by": before.parallel.tensor_model_parallel_size,
    }
    training = {**template["training"], "pretrained": str(folder.resolve())}
    data = _with_tokenizer_of(folder, template["data"])
    raw = {**template, "model": model, "training": training, "data": data}
    run = RunConfig.from_dict(raw)
    with PretrainedWeights(folder, architecture) as weights:
        weights.check()
    check_tokenizer(folder, build_tokenizer(run.tokenizer), architecture.vocab_size)
    return raw


def check_fits(folder: Path, architecture: Architecture) -> None:
    """Raise ValueError, one line per problem, unless the folder has all weights of this model."""
    ours = model_fields(architecture)
    lines = [
        f"training.pretrained: model.{name} is {ours.get(name)!r}, but {value!r} in {folder / 'config.json'}"
        for name, value in model_fields(read_architecture(folder)).items()
        if name != "seq_length" and ours.get(name) != value
    ]
    if lines:
        raise ValueError("\n".join(lines))
    with PretrainedWeights(folder, architecture) as weights:
        weights.check()


def model_fields(architecture: Architecture) -> dict[str, Any]:
    """Return the fields of a run's `model` block that determine its weights, and `seq_length`."""
    excluded = ("tied_embeddings", "padded_vocab_size", "init_method_std")
    own = family_of(architecture).own_fields
    return {
        **{
            name: value
            for name, value in asdict(architecture).items()
            if name not in excluded and (name in own or not families_with(name))
        },
        "untie_embeddings_and_output_weights": not architecture.tied_embeddings,
    }


# The tokenizer


def _with_tokenizer_of(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Return the block `data` with the folder's tokenizer.

    It is unchanged if it names a tokenizer, or if the folder has none or the byte-level one.
    """
    if "tokenizer_type" in data or not (folder / "tokenizer.json").exists():
        return data
    if _same_tokens(FastTokenizer(folder), ByteTokenizer()):
        return data
    # The model has learned from documents that begin as its tokenizer begins them.
    begin = {"prepend_bos": True} if folder_adds_bos(folder) else {}
    place = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder.resolve())}
    return {**begin, **data, **place}


def check_tokenizer(folder: Path, ours: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError when the token ids of a Hugging Face model are not those of the run's tokenizer.

    A folder without a tokenizer is accepted: its model may have been trained with the run's tokenizer.
    """
    if vocab_size < ours.vocab_size:
        raise ValueError(
            f"{folder}: a vocabulary of {vocab_size} is smaller than the run's tokenizer's {ours.vocab_size} "
            "(the byte-level tokenizer has 257)"
        )
    if (folder / "tokenizer.json").exists():
        if not _same_tokens(FastTokenizer(folder), ours):
            raise ValueError(
                f"{folder}: its tokenizer is not the one of the block data; the model's own is "
                f"data.tokenizer_type HuggingFaceTokenizer with data.tokenizer_model {folder}"
            )
    elif (folder / "tokenizer.model").exists():
        raise ValueError(
            f"{folder}: its tokenizer is a tokenizer.model, and a tokenizer.json is needed; "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one"
        )


def _same_tokens(theirs: FastTokenizer, ours: Tokenizer) -> bool:
    """Return whether texts have the same tokens; a fast tokenizer of ours may have further ones."""
    if isinstance(ours, FastTokenizer):
        return ours.extends(theirs)
    return all(theirs.encode(text).tolist() == ours.encode(text).tolist() for text in sample_texts(()))


# The files


def read_architecture(folder: Path) -> Architecture:
    """Return the model that config.json describes; raises ValueError, in one line, where it is not supported."""
    theirs = _read_config(folder)
    try:
        return architecture_of(theirs)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None


class PretrainedWeights:
    """Reads the weights of a Hugging Face folder as parameters of an architecture; a context manager."""

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        """Raises ValueError when there are no weights, or one of their files is missing."""
        self.folder = folder
        self._table = table_of(architecture)
        self._file_names = _find_tensors(folder)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "PretrainedWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, name: str) -> Tensor:
        """Return the full parameter of that name in the unsplit model, in the folder's precision.

        Raises ValueError when a tensor is missing or cannot be read.
        """
        return self._table.find(name).from_hf(lambda tensor: self._file_of(tensor).get_tensor(tensor))

    def check(self) -> None:
        """Raise ValueError unless all tensors are there, with the right shapes, in floating-point numbers.

        Only the headers of the files are read.
        """
        for parameter in self._table:
            for name, shape in parameter.hf_shapes.items():
                header = self._file_of(name).get_slice(name)
                where, dtype, found = f"{self._path(name)}: {name}", header.get_dtype(), header.get_shape()
                if dtype not in ("F32", "BF16", "F16"):
                    raise ValueError(f"{where} is {dtype}; weights must be F32, BF16 or F16, not quantized")
                if found != list(shape):
                    raise ValueError(f"{where} is {found}, not {list(shape)}")

    def _file_of(self, name: str) -> Any:
        """Return the open file that holds a tensor."""
        if name not in self._file_names:
            raise ValueError(f"{self.folder}: no tensor {name}")
        path = self._path(name)
        try:
            if path.name not in self._open:
                self._open[path.name] = self._stack.enter_context(safe_open(path, framework="pt"))
            self._open[path.name].get_slice(name)  # fails where the index names the wrong file
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: {error}") from None
        return self._open[path.name]

    def _path(self, name: str) -> Path:
        return self.folder / self._file_names[name]


def _find_tensors(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor, from the index or the single file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        where = _read_object(index, "weights must be safetensors").get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise ValueError(f"{index}: no weight_map, an object of file names")
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


def _read_config(folder: Path) -> dict[str, Any]:
    return _read_object(folder / "config.json", "give the folder of a Hugging Face model")


def _read_object(path: Path, advice: str) -> dict[str, Any]:
    """Return the JSON object in a file; raises ValueError."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {advice}") from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object; {advice}")
    return content
