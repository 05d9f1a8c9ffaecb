"""A run that starts from a Hugging Face folder: the config for it, and whether a config is right for it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_noloco.config import RunConfig
from megatron_noloco.data.tokenizer import build_tokenizer
from megatron_noloco.huggingface.folder import PretrainedWeights, read_architecture, read_config
from megatron_noloco.huggingface.tokenizer import check_tokenizer, with_tokenizer_of
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import families_with, family_of


def import_folder(folder: Path, template: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a run that starts from the folder: the template's, with the folder's model and tokenizer.

    Moves no weights. Raises ValueError, in one line, when no run can start from the folder.
    """
    before, architecture = RunConfig.from_dict(template), read_architecture(folder)
    kept = {
        name: value
        for name, value in template["model"].items()
        if not families_with(name) or architecture.family in families_with(name)
    }
    model = {
        **_training_settings(folder),
        **kept,
        **model_block(architecture),
        "seq_length": before.model.seq_length,
        "make_vocab_size_divisible_by": before.parallel.tensor_model_parallel_size,
    }
    training = {**template["training"], "pretrained": str(folder.resolve())}
    data = with_tokenizer_of(folder, template["data"])
    raw = {**template, "model": model, "training": training, "data": data}
    run = RunConfig.from_dict(raw)
    with PretrainedWeights(folder, architecture) as weights:
        weights.check()
    check_tokenizer(folder, build_tokenizer(run.tokenizer), architecture.vocab_size)
    return raw


def _training_settings(folder: Path) -> dict[str, Any]:
    """What a folder says about the training of its model, under our names; a template may say otherwise."""
    dropout = read_config(folder).get("attention_dropout")
    return {"attention_dropout": dropout} if dropout else {}


def check_fits(folder: Path, architecture: Architecture) -> None:
    """Raise ValueError, one line per problem, unless the folder holds the weights of this model, all of them."""
    ours = model_block(architecture)
    lines = [
        f"training.pretrained: model.{name} is {ours.get(name)!r}, but {value!r} in {folder / 'config.json'}"
        for name, value in model_block(read_architecture(folder)).items()
        if name != "seq_length" and ours.get(name) != value
    ]
    if lines:
        raise ValueError("\n".join(lines))
    with PretrainedWeights(folder, architecture) as weights:
        weights.check()


def model_block(architecture: Architecture) -> dict[str, Any]:
    """The fields of a run's `model` block that decide which weights fit, and the length of a sample."""
    sizes = asdict(architecture)
    return {
        "family": architecture.family,
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
        "kv_channels": architecture.kv_channels,
        "vocab_size": architecture.vocab_size,
        "rotary_base": architecture.rotary_base,
        "yarn_rotary_scaling_factor": architecture.yarn_rotary_scaling_factor,
        "yarn_original_max_position_embeddings": architecture.yarn_original_max_position_embeddings,
        "norm_epsilon": architecture.norm_epsilon,
        "untie_embeddings_and_output_weights": not architecture.tied_embeddings,
        "seq_length": architecture.seq_length,
        **{name: sizes[name] for name in family_of(architecture).own_fields if name in sizes},
    }
