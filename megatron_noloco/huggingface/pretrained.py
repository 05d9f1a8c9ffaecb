"""Start a run from a Hugging Face folder: read its architecture and tokenizer, and write a config."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_noloco.config import RunConfig
from megatron_noloco.config.data_block import DataConfig
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.data.fast_tokenizer import FastTokenizer
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerChoice, build_tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import read_object
from megatron_noloco.huggingface.weight_files import PretrainedWeights
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import architecture_of, families_with, family_of

# Text in which tokenizers of bytes differ from others: lines, digits, accents in two forms, scripts, emoji, NUL.
_SAMPLE = "Byte by byte, \n\t3.14 é e\u0301 ﬁ İ ß \u00a0½ 日本語 עברית 👩‍👩‍👧 a\0b\u200bc"
UNFINISHED = "UNFINISHED"  # name of a file that marks an export that was not checked, or failed the check


def import_folder(folder: Path, template: RunConfig) -> RunConfig:
    """Return the config of a run that starts from the folder: the template with the folder's model and tokenizer.

    No weights are copied.
    Raises UserError, in one line, when no run can start from the folder.
    """
    check_finished(folder)
    architecture, before = read_architecture(folder), template.model
    given = {
        name: getattr(before, name)
        for name in before.model_fields_set
        if not families_with(name) or architecture.family in families_with(name)
    }
    _check_dropouts(folder, architecture, given)
    model = {
        **_dropouts(architecture, _config_of(folder)),  # the template may override them
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
    with PretrainedWeights(folder, architecture) as weights:
        weights.check_finite()
    check_tokenizer(folder, build_tokenizer(run.data.tokenizer), architecture.vocab_size)
    return run


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
    if named or not (folder / "tokenizer.json").exists():
        return data
    tokenizer = tokenizer_of(folder)
    if isinstance(tokenizer, ByteTokenizer):
        return data
    # The model has learned from documents that begin as its tokenizer begins them.
    begins = bool(tokenizer.before_document) and "prepend_bos" not in data.model_fields_set
    begin = {"prepend_bos": True} if begins else {}
    return data.replace(**begin, tokenizer_model=str(folder.resolve()))


def missing_bos(folder: Path, data: DataConfig) -> str:
    """Return a line where texts of the model begin with BOS, and the block `data` says nothing about it."""
    if "prepend_bos" in data.model_fields_set or not (folder / "tokenizer.json").exists():
        return ""
    if not build_tokenizer(TokenizerChoice(str(folder), cache=data.cache)).adds_bos:
        return ""
    return (
        f"data.prepend_bos: {folder} puts BOS before each text, and this run does not; set it to true, or to "
        "false to train without"
    )


def tokenizer_of(folder: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face model: the byte-level one where it is the same, as in our exports.

    Raises UserError where there is none.
    """
    theirs, byte = build_tokenizer(TokenizerChoice(str(folder))), ByteTokenizer()
    if theirs.adds_bos:
        theirs = build_tokenizer(TokenizerChoice(str(folder), prepend_bos=True))
    ends = (theirs.before_document, theirs.end_of_document) == (byte.before_document, byte.end_of_document)
    return byte if ends and _same_tokens(theirs, byte) else theirs


def check_tokenizer(folder: Path, ours: Tokenizer, vocab_size: int) -> None:
    """Raise UserError when the token ids of a Hugging Face model are not those of the run's tokenizer.

    A folder without a tokenizer is accepted: its model may have been trained with the run's tokenizer.
    """
    if vocab_size < ours.vocab_size:
        raise UserError(
            f"{folder}: a vocabulary of {vocab_size} is smaller than the run's tokenizer's {ours.vocab_size} "
            "(the byte-level tokenizer has 257)"
        )
    if (folder / "tokenizer.json").exists():
        if not _same_tokens(build_tokenizer(TokenizerChoice(str(folder))), ours):
            place = f"in {ours.folder}" if isinstance(ours, FastTokenizer) else "of bytes"
            raise UserError(
                f"{folder}: the model's tokenizer reads texts as other tokens than the run's {place}; to take the "
                f"model's, set data.tokenizer_model {folder}"
            )
    elif (folder / "tokenizer.model").exists():
        raise UserError(
            f"{folder}: its tokenizer is a tokenizer.model, and a tokenizer.json is needed; "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one"
        )


def _same_tokens(theirs: Tokenizer, ours: Tokenizer) -> bool:
    """Return whether texts have the same tokens; a fast tokenizer of ours may have further ones."""
    if isinstance(ours, FastTokenizer) and isinstance(theirs, FastTokenizer):
        return ours.extends(theirs)
    return theirs.encode(_SAMPLE).tolist() == ours.encode(_SAMPLE).tolist()


# The files


def check_finished(folder: Path) -> None:
    """Raise UserError for an export that was not checked, or failed the check."""
    if (folder / UNFINISHED).exists():
        raise UserError(
            f"{folder / UNFINISHED}: this export ended before its check, or failed it; export the model again, or "
            "remove the file to use the folder as it is"
        )


def read_architecture(folder: Path) -> Architecture:
    """Return the model that config.json describes; raises UserError, a line per problem."""
    theirs = _config_of(folder)
    try:
        architecture = architecture_of(theirs)
        if problems := _problems(architecture, theirs):
            raise UserError("\n".join(problems))
    except UserError as error:
        lines = (f"{folder / 'config.json'}: {line}" for line in str(error).splitlines())
        raise UserError("\n".join(lines)) from None
    return architecture


def _problems(architecture: Architecture, theirs: dict[str, Any]) -> list[str]:
    """Return what a run's block `model` refuses of a folder's model, with Hugging Face's keys for its fields."""
    family = family_of(architecture)
    keys = {**family.hf_sizes, "rotary_base": "rope_theta", "norm_epsilon": family.hf_norm_epsilon}
    keys |= {ours: key for key, ours in family.hf_dropouts.items()}
    try:
        ModelConfig(**model_fields(architecture) | _dropouts(architecture, theirs))
    except UserError as error:
        # Names of fields, which begin a line without the block.
        named = re.compile(r"\b(?:ModelConfig|model)\.(\w+)")
        lines = str(error).splitlines()
        return [named.sub(lambda field: keys.get(field[1], f"model.{field[1]}"), line) for line in lines]
    return []


def _dropouts(architecture: Architecture, theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the dropout probabilities of config.json above 0, as fields of a run's block `model`."""
    dropouts = {ours: theirs.get(key) for key, ours in family_of(architecture).hf_dropouts.items()}
    return {ours: value for ours, value in dropouts.items() if value}


def _check_dropouts(folder: Path, architecture: Architecture, given: dict[str, Any]) -> None:
    """Raise UserError where two keys of config.json that are one field of a run differ, if no field is given."""
    theirs, dropouts = _config_of(folder), family_of(architecture).hf_dropouts
    for ours in {*dropouts.values()} - {*given}:
        found = {key: theirs.get(key) or 0.0 for key in dropouts if dropouts[key] == ours}
        if len({*found.values()}) > 1:
            named = " and ".join(f"{key} is {value}" for key, value in found.items())
            raise UserError(
                f"{folder / 'config.json'}: {named}; model.{ours} is one value for both: give it in --config"
            )


def config_for_any_version(folder: Path) -> dict[str, Any]:
    """Return the keys of config.json, those of the model in the forms of transformers 4 and 5.

    Version 4 would take the defaults for keys that only 5 reads, such as the base in `rope_parameters`.
    """
    architecture = read_architecture(folder)
    ours = family_of(architecture).hf_config(architecture, "float32")
    others = ("dtype", "torch_dtype")
    return _config_of(folder) | {key: value for key, value in ours.items() if key not in others}


def _config_of(folder: Path) -> dict[str, Any]:
    return read_object(folder / "config.json", "give the folder of a Hugging Face model")
