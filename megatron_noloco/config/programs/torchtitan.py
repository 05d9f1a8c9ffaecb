"""The TOML of torchtitan (before its configs became Python)."""

from typing import Any

from megatron_noloco.config.programs.row import Carried, Program, Words, table

_MEMORY = (
    "a replica's weights are whole on each data-parallel rank, its optimizer is divided (ZeRO 1); attach works "
    "around fully_shard (docs/other-trainers.md)"
)
_SPEED = "a replica computes with Megatron-core, whose fastest way is chosen"
_TRACES = "metrics.jsonl has the time of each phase; docs/watching.md"
_FLOAT8 = 'its scales would be reduced over all replicas; use "bf16": {"enabled": true}'
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_SELECTIVE = {"recompute_granularity": "selective"}

# Sizes that torchtitan has by name, not in the file: hidden_size, num_layers, num_attention_heads,
# num_query_groups, ffn_hidden_size.
_LLAMA3 = {
    "debugmodel": (256, 6, 16, 16, 768),
    "8B": (4096, 32, 32, 8, 14336),
    "70B": (8192, 80, 64, 8, 28672),
    "405B": (16384, 126, 128, 8, 53248),
}
_QWEN3 = {
    "debugmodel": (256, 8, 16, 8, 3072),
    "0.6B": (1024, 28, 16, 8, 3072),
    "1.7B": (2048, 28, 16, 8, 6144),
    "4B": (2560, 36, 32, 8, 9728),
    "8B": (4096, 36, 32, 8, 12288),
    "14B": (5120, 40, 40, 8, 17408),
    "32B": (5120, 64, 64, 8, 25600),
}
_TIED = ("debugmodel", "0.6B", "1.7B", "4B")


def titan_model(name: str, flavor: str) -> dict[str, Any] | None:
    """Return the block `model` of a model of torchtitan; None for one without an equal."""
    sizes = {"llama3": _LLAMA3, "qwen3": _QWEN3}.get(name, {}).get(flavor)
    if sizes is None:
        return None
    names = ("hidden_size", "num_layers", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
    small = flavor == "debugmodel"
    if name == "llama3":
        own = {"family": "llama", "rotary_base": 500000.0, "rope_scaling_factor": 8.0, "norm_epsilon": 1e-5}
        own["vocab_size"] = 2048 if small else 128256
    else:
        own = {"family": "qwen3", "rotary_base": 1e6, "kv_channels": 128, "norm_epsilon": 1e-6}
        own["vocab_size"] = 2048 if small else 151936
        own["untie_embeddings_and_output_weights"] = flavor not in _TIED
    return own | dict(zip(names, sizes, strict=True))


_CARRIED: Words = {
    "model.name": Carried("facts.titan_model"),
    "model.flavor": Carried("facts.titan_flavor"),
    **dict.fromkeys(("model.hf_assets_path", "model.tokenizer_path"), Carried("data.tokenizer_model")),
    "optimizer.name": Carried("optimizer.type", {"Adam": "Adam", "AdamW": "AdamW"}),
    "optimizer.lr": Carried("optimizer.params.lr"),
    "optimizer.eps": Carried("optimizer.params.eps"),
    "optimizer.weight_decay": Carried("optimizer.params.weight_decay"),
    "optimizer.beta1": Carried("facts.beta1"),
    "optimizer.beta2": Carried("facts.beta2"),
    "lr_scheduler.warmup_steps": Carried("facts.warmup_steps"),
    "lr_scheduler.total_steps": Carried("facts.schedule_steps"),
    "lr_scheduler.decay_ratio": Carried("facts.decay_share"),
    "lr_scheduler.decay_type": Carried(
        "facts.decay_type", {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}
    ),
    **dict.fromkeys(("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min"), Carried("facts.min_ratio")),
    "training.local_batch_size": Carried("train_micro_batch_size_per_gpu"),
    "training.batch_size": Carried("train_micro_batch_size_per_gpu"),
    "training.global_batch_size": Carried(
        "facts.global_batch_size", lambda size: None if size == -1 else size
    ),
    "training.seq_len": Carried("model.seq_length"),
    "training.max_norm": Carried("gradient_clipping"),
    "training.steps": Carried("training.train_iters"),
    "training.seed": Carried("training.seed"),
    "debug.seed": Carried("training.seed"),
    "training.mixed_precision_param": Carried("bf16.enabled", {"bfloat16": True, "float32": False}),
    "training.dataset_path": Carried("data.text"),
    "parallelism.data_parallel_replicate_degree": Carried("facts.replicate"),
    "parallelism.data_parallel_shard_degree": Carried("facts.shard"),
    "parallelism.tensor_parallel_degree": Carried("parallel.tensor_model_parallel_size"),
    "parallelism.pipeline_parallel_degree": Carried("parallel.pipeline_model_parallel_size"),
    "parallelism.expert_parallel_degree": Carried("parallel.expert_model_parallel_size"),
    "parallelism.pipeline_parallel_layers_per_stage": Carried("facts.virtual_layers"),
    "job.dump_folder": Carried("training.output_dir"),
    "metrics.log_freq": Carried("training.log_interval"),
    "metrics.enable_tensorboard": Carried("tensorboard.enabled"),
    "metrics.enable_wandb": Carried("wandb.enabled"),
    "checkpoint.enable": Carried("facts.save_when", {True: "steps", False: "no"}),
    "checkpoint.enable_checkpoint": Carried("facts.save_when", {True: "steps", False: "no"}),
    "checkpoint.interval": Carried("facts.save_every"),
    "checkpoint.keep_latest_k": Carried("checkpoint.keep_last", lambda number: number or None),
    "checkpoint.async_mode": Carried(
        "checkpoint.async_save", {"disabled": False, "async": True, "async_with_pinned_mem": True}
    ),
    "activation_checkpoint.mode": Carried(
        "model", {"none": None, "full": _FULL, "selective": _SELECTIVE, "memory_budget": _SELECTIVE}
    ),
    "validation.enable": Carried("facts.evaluate_when", {True: "steps", False: "no"}),
    "validation.freq": Carried("facts.evaluate_every"),
    "validation.steps": Carried(
        "evaluation", lambda steps: {"full": True} if steps == -1 else {"iters": steps}
    ),
}

_MEANINGLESS = {
    _FLOAT8.partition(";")[0]: "quantize.* float8.* mx.* quantize float8 mx",
    "config --check prints the model": "model.print_after_conversion",
    _SPEED: """
        optimizer.implementation optimizer.early_step_in_backward optimizer.fused training.gc_*
        training.deterministic debug.deterministic* compile.* training.compile
        parallelism.disable_loss_parallel parallelism.enable_async_tensor_parallel
        experimental.enable_async_tensor_parallel parallelism.enable_compiled_autograd
        parallelism.context_parallel_* experimental.context_parallel_*
        parallelism.expert_parallel_comm_backend
    """,
    "gradients are added up in fp32": "training.mixed_precision_reduce",
    "reading and the order of samples follow from training.seed (docs/data.md)": """
        training.dataloader validation.dataloader training.data_parallel_* training.dataloader.*
    """,
    _MEMORY: "parallelism.fsdp_reshard_after_forward",
    "the schedule is 1F1B, with virtual stages interleaved: parallel.virtual_pipeline_...": """
        parallelism.pipeline_parallel_*
    """,
    "it names the run": "job.description job.print_config job.save_config_file job.config_file",
    "each replica logs to its folder below training.output_dir": "metrics.*",
    _TRACES: "profiling.* comm.* memory_estimation.*",
    "checkpoints here have a form of their own; export writes Hugging Face's": "checkpoint.*",
    "model.recompute_modules says which parts": "activation_checkpoint.*",
    "evaluations read data.valid_data_path, or the validation part of data.split": "validation.*",
    "rounds are noloco's": "fault_tolerance.*",
}

_NO_EQUAL = {
    _FLOAT8: "model.converters",
    "set data.text to a file or folder: hf download --repo-type dataset NAME": "training.dataset",
    "master weights are fp32": "training.dtype=float32",
    "the inner optimizer works where the model is": "training.enable_cpu_offload",
    "a sequence stays whole but for parallel.sequence_parallel": """
        parallelism.context_parallel_degree=1 experimental.context_parallel_degree=1
    """,
    "experts are cut by parallel.tensor_model_parallel_size, as other layers": """
        parallelism.expert_tensor_parallel_degree=1
    """,
    "layers are divided by parallel.num_layers_in_first_pipeline_stage and its neighbours": """
        parallelism.module_fqns_per_model_part parallelism.pipeline_parallel_split_points
        experimental.pipeline_parallel_split_points
    """,
    "own Python is run by attach (docs/library.md)": """
        job.custom_config_module experimental.custom_import experimental.custom_args_module
    """,
    "start from the model's Hugging Face folder: megatron-noloco import FOLDER --config THIS": """
        checkpoint.initial_load_path checkpoint.initial_load_in_hf
    """,
    "replicas here are separate jobs (the block federation), and rounds are noloco's": """
        fault_tolerance.enable
    """,
    "experts are chosen by their router": "debug.moe_force_load_balance",
}


TORCHTITAN = Program(
    "torchtitan",
    table(_CARRIED, _MEANINGLESS, _NO_EQUAL),
    {
        "optimizer.name": "AdamW",
        "optimizer.lr": 8e-4,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
        "lr_scheduler.warmup_steps": 200,
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.min_lr_factor": 0.0,
        "training.local_batch_size": 8,
        "training.seq_len": 2048,
        "training.max_norm": 1.0,
        "training.steps": 10000,
        "training.mixed_precision_param": "bfloat16",
        "metrics.log_freq": 10,
        "metrics.enable_tensorboard": False,
        "job.dump_folder": "./outputs",
        "checkpoint.enable": False,
        "checkpoint.interval": 500,
        "validation.enable": False,
        "validation.freq": 10,
    },
)
