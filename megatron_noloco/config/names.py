"""Names of other programs and of earlier versions, and what to write here instead."""

from collections.abc import Iterable, Sequence

from megatron_noloco.fields import Path, dotted, nearest
from megatron_noloco.model.families import FAMILIES

# What users of Megatron, DeepSpeed, Hugging Face or DiLoCo write, in small letters, and the field that it is here,
# with the block where the name stands for a field in one block alone.
ALIASES = {
    "batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "num_micro_batches": "gradient_accumulation_steps",
    "clip_grad": "gradient_clipping",
    "max_grad_norm": "gradient_clipping",
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "dp": "parallel.data_parallel_size",
    "ep": "parallel.expert_model_parallel_size",
    "vpp": "parallel.virtual_pipeline_model_parallel_size",
    "noloco.k": "noloco.local_steps",
    "noloco.h": "noloco.local_steps",
    "inner_steps": "noloco.local_steps",
    "sync_every": "noloco.local_steps",
    "noloco.alpha": "noloco.outer_momentum",
    "noloco.beta": "noloco.outer_lr",
    "outer_learning_rate": "noloco.outer_lr",
    "noloco.gamma": "noloco.consensus_weight",
    "moe_ffn_hidden_size": "model.ffn_hidden_size",
    "num_experts": "model.num_moe_experts",
    "num_local_experts": "model.num_moe_experts",
    "num_experts_per_tok": "model.moe_router_topk",
    "rope_theta": "model.rotary_base",
    "rms_norm_eps": "model.norm_epsilon",
    "max_steps": "training.train_iters",
    "pipeline": "parallel.pipeline_model_parallel_size",
    "tensor_parallel": "parallel.tensor_model_parallel_size",
    "expert_parallel": "parallel.expert_model_parallel_size",
    "sequence_parallel_size": "parallel.sequence_parallel",
    **dict.fromkeys(
        ("activation_checkpointing", "checkpoint_activations", "recompute_activations"),
        "model.recompute_granularity",
    ),
    "exit_duration_in_mins": "training.exit_duration_minutes",
    "save": "training.output_dir",
    "torch_autocast": "bf16.enabled",
    "amp": "bf16.enabled",
    "steps_per_print": "training.log_interval",
}
for _family in FAMILIES.values():
    ALIASES |= {theirs: f"model.{ours}" for ours, theirs in _family.hf_sizes.items() if theirs != ours}
_OF_FAMILY = (
    *("hidden_act", "activation_func", "gated_linear_unit", "swiglu", "normalization", "qk_layernorm"),
    *("use_bias", "attention_bias", "mlp_bias", "add_bias_linear", "disable_bias_linear", "add_qkv_bias"),
    "position_embedding_type",
)
# Where no field is the same, what to know instead.
HINTS = {
    **dict.fromkeys(
        ("learning_rate", "lr", "min_lr", "lr_warmup_iters", "lr_decay_iters", "lr_decay_style"),
        "learning rates are in optimizer.params, their course in scheduler; see docs/optimizers.md",
    ),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay"),
        "optimizer.params has betas, eps and weight_decay; see docs/optimizers.md",
    ),
    **dict.fromkeys(("vocab_file", "merge_file"), "data.tokenizer_model names a folder with tokenizer.json"),
    "use_distributed_optimizer": "zero_optimization.stage 1 is the default; leave it out",
    **dict.fromkeys(
        ("data.path", "data.file", "data.files", "dataset"), "set data.text, or see docs/data.md"
    ),
    "global_batch_size": "train_batch_size counts the samples of ONE replica; all replicas together take "
    "parallel.replicas times as many",
    **dict.fromkeys(_OF_FAMILY, "model.family decides it; leave it out"),
    "reset_position_ids": "rotary embeddings know differences of positions only, so documents are told apart by "
    "data.reset_attention_mask alone; leave it out",
    "tie_word_embeddings": "model.untie_embeddings_and_output_weights says the opposite",
    "csv_monitor": "each replica has all its numbers in metrics.jsonl",
    "comet": "use wandb or tensorboard",
    "flops_profiler": "metrics.jsonl has speed/tflops_per_gpu",
    "wall_clock_breakdown": "metrics.jsonl has the time of each phase",
    "comms_logger": "metrics.jsonl has bytes and waits",
}
NOT_SUPPORTED = {
    "context_parallel_size": "a sequence stays whole but for parallel.sequence_parallel",
    "expert_tensor_parallel_size": "experts are cut by parallel.tensor_model_parallel_size, as other layers",
    "fp8": 'its scales would be reduced over all replicas; use "bf16": {"enabled": true}',
    "cuda_graph_impl": "a graph would freeze the routes",
    "enable_cuda_graph": "a graph would freeze the routes",
    "onebitadam": "it does not work with ZeRO; use AdamW, and noloco.payload for smaller exchanges",
    **dict.fromkeys(
        ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"),
        "the inner optimizer works where the model is; the outer one's weights are in host memory already "
        '(noloco.slow_weights "host")',
    ),
    "overlap_comm": "gradients are reduced once, after all microbatches",
    "compile": "the forward pass runs outside of DeepSpeed",
    **dict.fromkeys(("adadelta", "adamax", "nadam", "radam", "rmsprop"), "use AdamW"),
    **dict.fromkeys(("lrrangetest", "onecycle"), "use WSD"),
}


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`, `4 microbatches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def quoted(names: Sequence[str]) -> str:
    """Return names as a list in words: `"a", "b" and "c"`."""
    *others, last = (f'"{name}"' for name in names)
    return f"{', '.join(others)} and {last}" if others else last


def hint_of(path: Path, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """Return what is probably meant by an unknown key or type; "" if nothing is known of it.

    Args:
        known: the keys of the same block, or the types.
        elsewhere: dotted names of the fields of all blocks.
    """
    if hint := _of_others(path):
        return hint
    meant = _at_another_place(path[-1].lower(), elsewhere)
    return f"did you mean {meant}?" if meant else nearest(path, known)


def names_of_others() -> dict[str, str]:
    """Return the names in other programs, in small letters, each with the field here or a sentence about it."""
    return ALIASES | HINTS | {name: f"not supported: {why}" for name, why in NOT_SUPPORTED.items()}


def _of_others(path: Path) -> str:
    told = names_of_others()
    for name in (dotted(path).lower(), path[-1].lower()):
        if name in told:
            return f"did you mean {told[name]}?" if name in ALIASES else told[name]
    return ""


def _at_another_place(name: str, elsewhere: Iterable[str]) -> str:
    """Return fields of this name, or with block and field read as one: eval_iters is evaluation.iters."""
    words = name.split("_")

    def is_meant(key: str) -> bool:
        if key.rpartition(".")[2] == name:
            return True
        theirs = key.replace(".", "_").split("_")
        return 1 < len(words) == len(theirs) and all(map(str.startswith, theirs, words))

    return " or ".join(list(filter(is_meant, elsewhere))[:2])
