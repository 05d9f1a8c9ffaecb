"""`python -m megatron_noloco export`: write a checkpoint as a Hugging Face folder, and check the folder."""

import json
import math
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.errors import UserError
from megatron_noloco.files import naming_file, put_in_place, write_tensors, write_text, writing
from megatron_noloco.huggingface.folder import ModelFolder
from megatron_noloco.huggingface.source import ModelSource
from megatron_noloco.huggingface.weight_files import INDEX, PretrainedWeights
from megatron_noloco.huggingface.whole_model import TOLERANCE, check_logits
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import Parameter, family_of, table_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNCHECKED = "unchecked"  # the folder of an export until its check has passed; the output itself may be a disk


def export(source: ModelSource, output: Path, dtype: str, max_shard_bytes: int) -> Path:
    """Write the Hugging Face folder `output`/unchecked, and return its path; `check_export` moves its files.

    Peak memory is that of one weight file and a few parameters: 1.35 GB for 1.3 billion parameters in files of
    500 MB (two files at a time took 1.98 GB).
    Raises UserError when `output` cannot be written, or holds anything but an unchecked export.
    """
    folder = output / UNCHECKED
    with writing(output, "--output"):
        output.mkdir(parents=True, exist_ok=True)
        if {*output.iterdir()} - {folder}:
            raise UserError(f"{output}: exists and is not empty; give another --output, or remove it")
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
    architecture, tokenizer = source.architecture, source.tokenizer
    begin = {"bos_token_id": tokenizer.beginning_of_document}
    config = config_json(architecture, source.config.model, dtype)
    _write_json(folder / "config.json", config | begin | {"eos_token_id": tokenizer.end_of_document})
    _write_json(folder / "generation_config.json", begin | {"eos_token_id": _ends(source)})
    with naming_file(folder):
        tokenizer.save(folder, architecture.seq_length)
    _write_weights(source, folder, DTYPES[dtype], max_shard_bytes)
    write_text(folder / "README.md", _model_card(source))
    return folder


def config_json(architecture: Architecture, model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of config.json, without BOS and EOS, of a run's model: what `import` reads of it, too."""
    family = family_of(architecture)
    dropouts = {key: getattr(model, ours) for key, ours in family.hf_dropouts.items()}
    return family.hf_config(architecture, dtype) | dropouts


def _ends(source: ModelSource) -> int | list[int]:
    """Return the token, or the tokens, at which a generated text ends; after fine-tuning an answer has its own."""
    end, of_answer = source.tokenizer.end_of_document, None
    if source.config.data.sft_data_path is not None:
        of_answer = source.tokenizer.end_of_answer
    return end if of_answer in (None, end) else [end, of_answer]


def _write_weights(source: ModelSource, output: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Write the weight files, and their index if there are several."""
    parameters = {name: row for row in table_of(source.architecture) for name in row.hf_shapes}
    sizes = {name: dtype.itemsize * math.prod(row.hf_shapes[name]) for name, row in parameters.items()}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    if split.is_sharded:
        index: dict[str, object] = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(output / INDEX, index)
    for file, names in split.filename_to_tensors.items():
        with naming_file(output / file):
            tensors = _tensors(source, {name: parameters[name] for name in names}, dtype)
            write_tensors(output / file, tensors, {"format": "pt"})


def _tensors(source: ModelSource, rows: dict[str, Parameter], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a file by name; `rows`: the parameter from which each is made."""
    reader = source.reader()
    tensors: dict[str, Tensor] = {}
    for parameter, names in groupby(rows, key=rows.__getitem__):
        parts = parameter.to_hf(reader.read(parameter.name, source.replicas))
        # copied, since the reader reuses its memory
        tensors |= {name: parts[name].to(dtype, copy=True) for name in names}
    return tensors


def _model_card(source: ModelSource) -> str:
    """Return the README.md of an export: how this model was trained, in numbers."""
    manifest, family = source.saved.manifests[0], source.architecture.family
    topology, mean_of, seen = manifest.topology, source.saved.mean_of, source.saved.consumed
    if len(source.replicas) > 1 or mean_of:
        model = f"the mean of {mean_of or len(source.replicas)} replicas' slow weights"
    else:
        model = f"replica {source.replicas[0]}" + (
            "" if topology.separate_jobs else f" of {topology.replicas}"
        )
    notes = [
        f"local steps: {manifest.step}",
        f"tokens of {seen.whose}{' together' * (seen.whose == 'all replicas')}: {seen.tokens}{seen.note}",
        f"parallel: {source.saved.layout_in_words}",
        *source.losses_report(),
    ]
    listed = "\n".join(f"- {note}" for note in notes)
    return f"""\
---
library_name: transformers
tags: [{family}, noloco]
---
# A {family.capitalize()} trained with {source.config.noloco.active_method}

This model is {model}, trained with megatron_noloco (NoLoCo, arXiv 2506.10911).

{listed}

The run's configuration, without the folders of its files:

```json
{json.dumps(_without_places(manifest.config), indent=1)}
```
"""


def _without_places(value: Any) -> Any:
    """Return a part of a config with each absolute path, which is of no use elsewhere, cut to its last name."""
    if isinstance(value, dict):
        return {key: _without_places(held) for key, held in value.items()}
    if isinstance(value, list):
        return [_without_places(held) for held in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "file:/")) else value


def _write_json(path: Path, content: dict[str, object]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def check_export(source: ModelSource, folder: Path) -> float:
    """Compare the logits of the folder that `export` returned with the trainer's; see `check_logits`.

    Returns the difference, and moves the files into the output if it is below TOLERANCE. The trainer's model is
    loaded from the checkpoint, not from the export, and rounded like the export. Raises UserError where the export
    cannot be imported again.
    """
    PretrainedWeights(folder, ModelFolder(folder).architecture).close()
    rounding = DTYPES[json.loads((folder / "config.json").read_text())["dtype"]]
    reader = source.reader()
    difference = check_logits(
        folder, source.architecture, lambda name: reader.read(name, source.replicas).to(rounding)
    )
    if difference < TOLERANCE:
        # config.json, by which a folder is a model's, comes last.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
            put_in_place(path, folder.parent / path.name)
        folder.rmdir()
    return difference
