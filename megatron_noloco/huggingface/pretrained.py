"""Start a run from a Hugging Face folder: read its architecture and tokenizer, and write a config."""

from collections.abc import Container, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron_noloco.config import RunConfig
from megatron_noloco.config.data_block import DataConfig
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.data.auto_tokenizer import TokenizerChoice, build_tokenizer
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import read_object
from megatron_noloco.huggingface.weight_files import PretrainedWeights
from megatron_noloco.job.activity import line_of
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import FAMILIES, architecture_of, families_with, family_of

_LONGEST_SAMPLE = 4096  # tokens, for a file that names no length: more needs much memory
# Files of tokenizers
_TOKENIZERS = "tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json"
_LOCAL_STEPS = 50  # of separate jobs, which cannot choose them together
_TO_CONTINUE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": 100, "cos_min_ratio": 0.1},
    },
    "gradient_clipping": 1.0,
    "evaluation": {"interval": 500},
}
UNFINISHED = "UNFINISHED"  # name of a file that marks an export that was not checked, or failed the check


def config_to_continue(
    sizes: Mapping[str, Any], data: Mapping[str, str], output_dir: str, in_one_job: bool
) -> RunConfig:
    """Return the config with which a model is continued where no file says how; raises UserError.

    Args:
        sizes: see `read_sizes`.
        data: what is read, by field of the block `data`.
        in_one_job: whether all replicas are in one job, which then chooses how often they exchange.
    """
    own: dict[str, Any] = {
        "bf16": {"enabled": torch.cuda.is_available() and torch.cuda.is_bf16_supported()},
        "noloco": {} if in_one_job else {"local_steps": _LOCAL_STEPS},
        "model": {**sizes, "seq_length": min(sizes["seq_length"], _LONGEST_SAMPLE)},
        "data": data,
        "training": {"train_iters": 2000, "output_dir": output_dir},
    }
    return RunConfig(**_TO_CONTINUE, **own)


def import_folder(folder: Path, template: RunConfig) -> tuple[RunConfig, str]:
    """Return the config of a run that starts from the folder: the template with the folder's model and tokenizer.

    The second value is a line for the user about the length of samples. No weights are copied. `check_logits` says
    whether the model computes the same here.
    Raises UserError, in one line, when no run can start from the folder.
    """
    check_finished(folder)
    config = read_config(folder)
    architecture, before = read_architecture(folder), template.model
    given = {
        name: getattr(before, name)
        for name in before.model_fields_set
        if not families_with(name) or architecture.family in families_with(name)
    }
    model = {
        **_dropouts(config, given),
        **given,
        **model_fields(architecture),
        "init_method_std": architecture.init_method_std,
        "seq_length": before.seq_length,
        "make_vocab_size_divisible_by": template.parallel.tensor_model_parallel_size,
    }
    run = template.replace(
        model=ModelConfig(**model),
        training=template.training.replace(pretrained=str(folder.resolve())),
        data=_with_tokenizer_of(folder, template.data),
    )
    PretrainedWeights(folder, architecture).close()
    check_tokenizer(folder, build_tokenizer(run.data.tokenizer), architecture.vocab_size, run.data.cache)
    context = "which is the model's own context"
    if before.seq_length != architecture.seq_length:
        context = f"as the config has it; the model's own context is {architecture.seq_length} tokens"
    return run, f"model.seq_length: {before.seq_length} tokens, {context}"


def read_sizes(folder: Path) -> dict[str, Any]:
    """Return the folder's values of the fields of a block `model` that all families have; raises UserError."""
    check_finished(folder)
    given = model_fields(read_architecture(folder))
    return {name: value for name, value in given.items() if not families_with(name)}


def check_fits(folder: Path, architecture: Architecture) -> None:
    """Raise UserError, one line per problem, unless the folder has all weights of this model, and is finished."""
    check_finished(folder)
    ours = model_fields(architecture)
    lines = [
        f"training.pretrained: model.{name} is {ours.get(name)!r}, but {value!r} in {folder / 'config.json'}"
        for name, value in model_fields(read_architecture(folder)).items()
        if name != "seq_length" and ours.get(name) != value
    ]
    if lines:
        raise UserError("\n".join(lines))
    PretrainedWeights(folder, architecture).close()


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


def _with_tokenizer_of(folder: Path, data: DataConfig) -> DataConfig:
    """Return the block `data` with the folder's tokenizer.

    It is unchanged if it names a tokenizer, or if the folder has none or the byte-level one.
    """
    named = {"tokenizer_type", "tokenizer_model"} & data.model_fields_set
    theirs = None if named else tokenizer_of(folder, data.cache)
    if theirs is None or isinstance(theirs, ByteTokenizer):
        return data
    # The model has learned from documents that begin as its tokenizer begins them.
    begin = {"prepend_bos": True} if theirs.adds_bos and "prepend_bos" not in data.model_fields_set else {}
    return data.replace(**begin, tokenizer_model=str(folder.resolve()))


def tokenizer_of(folder: Path, cache: str | None) -> Tokenizer | None:
    """Return the tokenizer of a Hugging Face model, with the BOS that it adds; None: it has none.

    It is the byte-level one where that is the same, as in our exports. Raises UserError as `build_tokenizer` does.

    Args:
        cache: see `TokenizerChoice`.
    """
    if not any(path for name in _TOKENIZERS for path in folder.glob(name)):
        return None
    choice = TokenizerChoice(str(folder), cache=cache)
    theirs, byte = build_tokenizer(choice), ByteTokenizer()
    if theirs.adds_bos:
        return build_tokenizer(replace(choice, prepend_bos=True))
    same = theirs.end_of_document == byte.end_of_document and byte.extends(theirs)
    return byte if same else theirs


def missing_bos(folder: Path, data: DataConfig) -> str:
    """Return a line where texts of the model begin with BOS, and the block `data` says nothing about it."""
    theirs = None if "prepend_bos" in data.model_fields_set else tokenizer_of(folder, data.cache)
    if theirs is None or not theirs.adds_bos:
        return ""
    return (
        f"data.prepend_bos: {folder} puts BOS before each text, and this run does not; set it to true, or to "
        "false to train without"
    )


def check_tokenizer(folder: Path, ours: Tokenizer, vocab_size: int, cache: str | None) -> None:
    """Raise UserError when the token ids of a Hugging Face model are not those of the run's tokenizer.

    A folder without a tokenizer is accepted: its model may have been trained with the run's tokenizer. The run's
    may have further tokens.

    Args:
        cache: see `TokenizerChoice`.
    """
    if vocab_size < ours.vocab_size:
        raise UserError(
            f"{folder}: a vocabulary of {vocab_size} is smaller than the run's tokenizer's {ours.vocab_size} "
            "(the byte-level tokenizer has 257)"
        )
    theirs = tokenizer_of(folder, cache)
    if theirs is not None and not ours.extends(theirs):
        place = f"in {ours.folder}" if ours.folder else "of bytes"
        raise UserError(
            f"{folder}: the model's tokenizer reads texts as other tokens than the run's {place}; to take the "
            f"model's, set data.tokenizer_model {folder}"
        )


# The files


def check_finished(folder: Path) -> None:
    """Raise UserError for an export that was not checked, or failed the check."""
    if (folder / UNFINISHED).exists():
        raise UserError(
            f"{folder / UNFINISHED}: this export ended before its check, or failed it; export the model again, or "
            "remove the file to use the folder as it is"
        )


def read_config(folder: Path) -> Any:
    """Return what transformers reads of config.json, with its defaults; raises UserError, in one line."""
    path = folder / "config.json"
    model_type = read_object(path, "give the folder of a Hugging Face model").get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(f'"{name}"' for name in FAMILIES)
        raise UserError(f"{path}: model_type is {model_type!r}; only {known} can be imported")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # it raises anything for values that it does not expect
        raise UserError(f"{path}: transformers cannot read it ({line_of(error)})") from None


def read_architecture(folder: Path) -> Architecture:
    """Return the model that config.json describes; raises UserError, a line per problem."""
    config = read_config(folder)
    try:
        architecture = architecture_of(config)
        ModelConfig(**model_fields(architecture) | _dropouts(config, ("hidden_dropout",)))
    except UserError as error:
        text = str(error).replace("ModelConfig.", "model.")
        raise UserError(
            "\n".join(f"{folder / 'config.json'}: {line}" for line in text.splitlines())
        ) from None
    return architecture


def _dropouts(config: Any, given: Container[str]) -> dict[str, Any]:
    """Return the dropout probabilities of a config of transformers above 0, as fields of a run's block `model`.

    Raises UserError where two of its keys are one field of a run, and differ, unless the field is given.
    """
    found: dict[str, Any] = {}
    for key, ours in FAMILIES[config.model_type].hf_dropouts.items():
        value = getattr(config, key, None) or 0.0
        if found.setdefault(ours, value) != value and ours not in given:
            raise UserError(
                f"{key} is {value}, of others {found[ours]}; model.{ours} is one value: give it in --config"
            )
    return {ours: value for ours, value in found.items() if value}
