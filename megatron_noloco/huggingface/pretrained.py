"""The config of a run that starts from a Hugging Face folder."""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_noloco.config import RunConfig
from megatron_noloco.config.data_block import DataConfig
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.data.auto_tokenizer import build_tokenizer
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.huggingface.folder import ModelFolder, model_fields
from megatron_noloco.model.families import families_with

_LONGEST_SAMPLE = 4096  # tokens, for a file that names no length: more needs much memory
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


def config_to_continue(
    sizes: Mapping[str, Any], data: Mapping[str, str], output_dir: str, in_one_job: bool
) -> RunConfig:
    """Return the config with which a model is continued where no file says how; raises UserError.

    Args:
        sizes: of a `ModelFolder`.
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


def import_folder(folder: ModelFolder, template: RunConfig) -> tuple[RunConfig, str]:
    """Return the config of a run that starts from the folder: the template with the folder's model and tokenizer.

    The second value is a line for the user about the length of samples. No weights are copied. `check_logits` says
    whether the model computes the same here.
    Raises UserError, in one line, when no run can start from the folder.
    """
    architecture, before = folder.architecture, template.model
    given = {
        name: getattr(before, name)
        for name in before.model_fields_set
        if not families_with(name) or architecture.family in families_with(name)
    }
    model = {
        **folder.dropouts(given),
        **given,
        **model_fields(architecture),
        "init_method_std": architecture.init_method_std,
        "seq_length": before.seq_length,
        "make_vocab_size_divisible_by": template.parallel.tensor_model_parallel_size,
    }
    run = template.replace(
        model=ModelConfig(**model),
        training=template.training.replace(pretrained=str(folder.path.resolve())),
        data=_with_tokenizer_of(folder, template.data),
    )
    folder.check_fits(architecture, build_tokenizer(run.data.tokenizer), run.data.cache)
    context = "which is the model's own context"
    if before.seq_length != architecture.seq_length:
        context = f"as the config has it; the model's own context is {architecture.seq_length} tokens"
    return run, f"model.seq_length: {before.seq_length} tokens, {context}"


def _with_tokenizer_of(folder: ModelFolder, data: DataConfig) -> DataConfig:
    """Return the block `data` with the folder's tokenizer.

    It is unchanged if it names a tokenizer, or if the folder has none or the byte-level one.
    """
    named = {"tokenizer_type", "tokenizer_model"} & data.model_fields_set
    theirs = None if named else folder.tokenizer(data.cache)
    if theirs is None or isinstance(theirs, ByteTokenizer):
        return data
    # The model has learned from documents that begin as its tokenizer begins them.
    begin = {"prepend_bos": True} if folder.missing_bos(data) else {}
    return data.replace(**begin, tokenizer_model=str(folder.path.resolve()))
