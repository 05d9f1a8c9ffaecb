"""Settings of other programs that are no field here: fields follow from several of them together."""

from typing import Literal

from megatron_noloco.engine.schedules import DecayType
from megatron_noloco.fields import NonNegative, Positive, Settings, Size, Text, field

_BATCH = "train_batch_size counts the samples of ONE replica; all take parallel.replicas times as many"
_RATES = "learning rates are in optimizer.params, their course in scheduler; see docs/optimizers.md"
_PARAMS = "optimizer.params has betas, eps and weight_decay; see docs/optimizers.md"
_LENGTH = "training.train_iters counts local steps"
_RANKS = "a run has parallel.replicas x the parallel sizes of a replica ranks"
_FAMILY = "model.family decides it; leave it out"
_FOLDER = "megatron-noloco import FOLDER writes the sizes; see docs/huggingface.md"
_TOKENIZER = "data.tokenizer_model names a folder with tokenizer.json"
_WHEN = "intervals are local steps: training.log_interval, checkpoint.save_interval, evaluation.interval"

When = Literal["no", "steps", "epoch"]


class Facts(Settings):
    """What the settings of other programs say in units that no field here has. None: nothing is said."""

    global_batch_size: Positive | None = field(None, _BATCH)
    nodes: Positive | None = field(None, _RANKS)
    ranks_per_node: Positive | None = field(None, _RANKS)
    ranks: Positive | None = field(None, _RANKS)
    replicate: Positive | None = field(None, "parallel.replicas")
    shard: int | None = field(None, "parallel.data_parallel_size", ge=-1)
    virtual_layers: Positive | None = field(
        None, "parallel.virtual_pipeline_model_parallel_size counts chunks"
    )

    train_samples: Positive | None = field(None, _LENGTH)
    train_tokens: Positive | None = field(None, _LENGTH)
    log_every: Size | None = field(None, _WHEN)
    print_every: Size | None = field(None, "training.log_interval counts local steps")
    save_every: Size | None = field(None, _WHEN)
    save_when: When | None = field(None, _WHEN)
    evaluate_every: Size | None = field(None, _WHEN)
    evaluate_when: When | None = field(None, _WHEN)
    evaluated_batches: NonNegative | None = field(None, "evaluation.iters counts microbatches")

    schedule: Literal["constant", "linear", "cosine", "WSD"] | None = field(None, _RATES)
    warmup_steps: NonNegative | None = field(None, _RATES)
    warmup_share: float | None = field(None, _RATES, ge=0, le=1)
    warmup_samples: NonNegative | None = field(None, _RATES)
    warmup_tokens: NonNegative | None = field(None, _RATES)
    schedule_steps: Positive | None = field(None, _RATES)
    schedule_samples: Positive | None = field(None, _RATES)
    schedule_tokens: Positive | None = field(None, _RATES)
    decay_steps: Positive | None = field(None, _RATES)
    decay_samples: Positive | None = field(None, _RATES)
    decay_share: float | None = field(None, _RATES, ge=0, le=1)
    decay_type: DecayType | None = field(None, _RATES)
    min_lr: Size | None = field(None, _RATES)
    min_ratio: float | None = field(None, _RATES, ge=0, le=1)

    beta1: Size | None = field(None, _PARAMS)
    beta2: Size | None = field(None, _PARAMS)
    sgd_momentum: Size | None = field(None, "optimizer.params.momentum")
    muon_momentum: Size | None = field(None, "optimizer.params.momentum")

    activation: Literal["gelu", "swiglu", "squared_relu", "quick_geglu"] | None = field(None, _FAMILY)
    normalization: Literal["LayerNorm", "RMSNorm"] | None = field(None, _FAMILY)
    biases: bool | None = field(None, _FAMILY)
    qkv_biases: bool | None = field(None, _FAMILY)
    qk_norm: bool | None = field(None, _FAMILY)
    position: Text | None = field(None, _FAMILY)
    grouped: bool | None = field(None, "model.num_query_groups is enough")
    rope_scaling: bool | None = field(None, "model.rope_scaling_factor is enough")
    expert_ffn_hidden_size: Positive | None = field(None, "model.ffn_hidden_size is that of an expert")
    titan_model: Text | None = field(None, "model.family and the sizes of the block model")
    titan_flavor: Text | None = field(None, "model.family and the sizes of the block model")
    model_folder: Text | None = field(None, _FOLDER)
    tokenizer_kind: Text | None = field(None, _TOKENIZER)
    tokenizer_file: Text | None = field(None, _TOKENIZER)
