"""Hugging Face's TrainingArguments, and what recipes of TRL and the alignment handbook write beside them."""

from typing import Any

from megatron_noloco.config.programs.row import Carried, Program, Words, launcher, same, table

_HUB = "megatron-noloco export writes a Hugging Face folder; `hf upload` publishes it"
_LOG = "metrics.jsonl, the log, watch and report have a run's numbers (docs/watching.md)"
_LOADER = "reading and the order of samples follow from training.seed (docs/data.md)"
_JOB = "the launcher and noloco decide it: docs/launchers.md, docs/exchange.md"
_SAVED = "checkpoints have a form of their own, and a run continues by itself (docs/checkpoints.md)"
_WHOLE = "a replica computes with Megatron-core, whose fastest way is chosen"
_EVALUATED = "an evaluation is the loss of the validation split, in microbatches as those of training"
_TOKENIZED = "the chat template, the ends and the kinds of records are found in the data (docs/data.md)"
_DATA = "set data.text, data.sft_data_path or data.data_path to files: hf download --repo-type dataset NAME"
_MEMORY = (
    "a replica's weights are not divided over its data-parallel ranks: use tensor parallelism or pipeline stages, "
    "or attach in Hugging Face's Trainer (docs/other-trainers.md)"
)
_PEFT = (
    "all weights are trained; attach in Hugging Face's Trainer exchanges adapters (docs/other-trainers.md)"
)

_OPTIMIZERS = {
    **dict.fromkeys(
        (
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_torch_xla",
            "adamw_apex_fused",
            "adamw_anyprecision",
            "adamw_hf",
        ),
        "AdamW",
    ),
    "sgd": "SGD",
}
_SCHEDULES = {
    **{name: name for name in ("constant", "linear", "cosine")},
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "WSD",
}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_OF_SCHEDULE = {
    "min_lr": "min_lr",
    "min_lr_rate": "min_ratio",
    "min_lr_ratio": "min_ratio",
    "num_decay_steps": "decay_steps",
    "decay_type": "decay_type",
}


def _schedule_kwargs(given: Any) -> dict[str, Any] | None:
    if not given:
        return None
    names = {
        name: value for name, value in dict(given).items() if name not in ("num_stable_steps", "num_cycles")
    }
    return {_OF_SCHEDULE.get(name, name): value for name, value in names.items()}


def _trackers(given: Any) -> dict[str, Any] | None:
    names = given if isinstance(given, list) else [given]
    found = {name: {"enabled": True} for name in ("tensorboard", "wandb") if name in names or "all" in names}
    return found or None


def _warmup(given: Any) -> dict[str, Any]:
    return {"warmup_share" if isinstance(given, float) and 0 < given < 1 else "warmup_steps": _whole(given)}


def _whole(given: Any) -> Any:
    return int(given) if isinstance(given, float) and given.is_integer() else given


_CARRIED: Words = {
    **launcher(),
    "output_dir": Carried("training.output_dir"),
    "per_device_train_batch_size": Carried("train_micro_batch_size_per_gpu"),
    "per_gpu_train_batch_size": Carried("train_micro_batch_size_per_gpu"),
    **same("", "gradient_accumulation_steps"),
    "max_steps": Carried("training.train_iters", lambda steps: None if steps == -1 else steps),
    "learning_rate": Carried("optimizer.params.lr"),
    "weight_decay": Carried("optimizer.params.weight_decay"),
    "adam_beta1": Carried("facts.beta1"),
    "adam_beta2": Carried("facts.beta2"),
    "adam_epsilon": Carried("optimizer.params.eps"),
    "optim": Carried("optimizer.type", _OPTIMIZERS),
    "max_grad_norm": Carried("gradient_clipping"),
    "lr_scheduler_type": Carried("facts.schedule", _SCHEDULES),
    "lr_scheduler_kwargs": Carried("facts", _schedule_kwargs),
    "warmup_steps": Carried("facts", _warmup),
    "warmup_ratio": Carried("facts.warmup_share", lambda share: share or None),
    "bf16": Carried("bf16.enabled"),
    "fp16": Carried("fp16.enabled"),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing"),
        Carried("model", {True: _FULL, False: None, None: None}),
    ),
    "logging_steps": Carried("facts.log_every"),
    "save_steps": Carried("facts.save_every"),
    "save_strategy": Carried(
        "facts.save_when", {"no": "no", "steps": "steps", "epoch": "epoch", "best": "epoch"}
    ),
    "save_total_limit": Carried("checkpoint.keep_last"),
    "eval_steps": Carried("facts.evaluate_every"),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy"),
        Carried("facts.evaluate_when", {"no": "no", "steps": "steps", "epoch": "epoch"}),
    ),
    "seed": Carried("training.seed"),
    "report_to": Carried("", _trackers),
    "project": Carried("wandb.project"),
    "run_name": Carried("wandb.group"),
    "model_name_or_path": Carried("facts.model_folder"),
    **dict.fromkeys(
        ("max_seq_length", "max_length", "cutoff_len", "block_size"), Carried("model.seq_length")
    ),
    "packing": Carried("data.sft_packing"),
    "train_file": Carried("data.text"),
    "mixed_precision": Carried(
        "", {"bf16": {"bf16.enabled": True}, "fp16": {"fp16.enabled": True}, "no": None}
    ),
}

_MEANINGLESS = {
    _PEFT.partition(";")[0]: "lora_* bnb_* use_bnb_* adapter_name_or_path",
    "`train` starts a run, or continues it": "do_train do_predict overwrite_output_dir",
    "bf16 and fp16 decide it; master weights are fp32": """
        torch_dtype dtype tf32 bf16_full_eval fp16_full_eval half_precision_backend fp16_opt_level
        fp16_backend
    """,
    _WHOLE: """
        attn_implementation use_liger* liger_kernel_config torch_compile* use_cache
        torch_empty_cache_steps gradient_checkpointing_kwargs activation_checkpointing_kwargs
        full_determinism jit_mode_eval use_ipex
    """,
    "all tokens of a local step count the same": "average_tokens_across_devices",
    _LOG: """
        logging_* log_* disable_tqdm include_num_input_tokens_seen include_tokens_per_second trackio_*
        debug skip_memory_metrics wandb_*
    """,
    _EVALUATED: """
        per_device_eval_batch_size per_gpu_eval_batch_size eval_* do_eval batch_eval_metrics
        prediction_loss_only include_for_metrics include_inputs_for_metrics metric_for_best_model
        greater_is_better label_names val_size bf16_eval
    """,
    _SAVED: """
        save_only_model save_on_each_node save_safetensors resume_from_checkpoint ignore_data_skip
        restore_callback_states_from_checkpoint enable_jit_checkpoint
    """,
    _HUB: "push_to_hub* hub_*",
    "training.seed decides the order of samples as well": "data_seed",
    _JOB: """
        local_rank use_cpu no_cuda use_mps_device ddp_* accelerator_config fsdp_* tpu_* mp_parameters
        ray_scope past_index split_batches dispatch_batches torchdynamo xpu_backend sharded_ddp
        use_legacy_prediction_loop
    """,
    "its settings are those of the JSON that it names: give that file as well": "deepspeed",
    _LOADER: """
        dataloader_* remove_unused_columns train_sampling_strategy group_by_length length_column_name
        dataset_num_proc preprocessing_num_workers dataset_batch_size shuffle max_samples
        max_train_samples max_eval_samples keep_linebreaks overwrite_cache dataset_kwargs dataset_config*
        dataset_*_split dataset_train_split dataset_test_split dataset_splits streaming dataset_dir
    """,
    _TOKENIZED: """
        chat_template* assistant_only_loss completion_only_loss eos_token pad_token dataset_text_field
        packing_strategy eval_packing template stage padding_free auto_insert_empty_system_msg
        tokenizer_name_or_path pad_to_multiple_of train_on_prompt mask_history
    """,
    "the folder of model_name_or_path is used as it is": """
        model_revision use_fast_tokenizer config_name tokenizer_name cache_dir token low_cpu_mem_usage
    """,
}

_NO_EQUAL = {
    "data.split says which part of data.text is for validation": "validation_file validation_split_percentage",
    "model.family and the sizes are those of --config": "model_type config_overrides",
    _DATA: "dataset_name dataset_mixture dataset_mixer datasets dataset dataset_id",
    "training.train_iters counts local steps; the log's line `data:` says how often the text is "
    "read": "num_train_epochs=3.0",
    _MEMORY: "fsdp parallelism_config",
    _PEFT: "use_peft=full load_in_4bit=full load_in_8bit=full finetuning_type=full",
    "it would change what is trained, and is not supported; leave it out": """
        label_smoothing_factor neftune_noise_alpha optim_target_modules auto_find_batch_size optim_args
    """,
    "a preference is not trained on; records with answers are (data.sft_data_path)": """
        loss_type rl_beta max_prompt_length
    """,
    "start from the model's Hugging Face folder: megatron-noloco import": "trust_remote_code",
    "weights are shown, never the best kept: compare evaluations with `report`": "load_best_model_at_end",
}


HUGGING_FACE = Program(
    "Hugging Face's TrainingArguments",
    table(_CARRIED, _MEANINGLESS, _NO_EQUAL),
    {
        "learning_rate": 5e-5,
        "lr_scheduler_type": "linear",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "optim": "adamw_torch",
        "max_grad_norm": 1.0,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "seed": 42,
        "logging_steps": 500,
        "save_steps": 500,
        "save_strategy": "steps",
        "eval_strategy": "no",
    },
)
