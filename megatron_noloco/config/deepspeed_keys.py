"""The keys DeepSpeed 0.19 reads and has no model for, so that a misspelt one is an error: it ignores what it does
not know.

Gathered from deepspeed/runtime/config.py and the config modules it calls; a contract test reads the installed
sources again and fails when a DeepSpeed upgrade brings a key that is missing here.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP_LEVEL = _words("""
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    optimizer scheduler gradient_clipping
    bf16 bfloat16 fp16 torch_autocast data_types
    communication_data_type seq_parallel_communication_data_type
    prescale_gradients gradient_predivide_factor gradient_allreduce_op disable_allgather
    zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer allgather_size
    steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level timers
    tensorboard wandb csv_monitor comet
    flops_profiler comms_logger autotuning
    activation_checkpointing checkpoint datastates_ckpt aio
    data_efficiency dataloader_drop_last vocabulary_size
    pipeline tensor_parallel expert_parallel sequence_parallel_size use_data_before_expert_parallelism
    hybrid_engine compile weight_quantization disable_python_gc
    """)

# Keys DeepSpeed would accept and that could not do here what they promise, with what does.
NOT_HERE = {
    "pipeline": "the pipeline is Megatron-core's; use parallel.pipeline_model_parallel_size",
    "tensor_parallel": "layers are split by Megatron-core; use parallel.tensor_model_parallel_size",
    "sequence_parallel_size": "the sequence is split by Megatron-core; use parallel.sequence_parallel",
    "expert_parallel": "experts are split by tensor parallelism; use parallel.tensor_model_parallel_size",
    "activation_checkpointing": "recomputation is Megatron-core's; use model.recompute_granularity",
    "data_efficiency": "samples are drawn by megatron_noloco, not by DeepSpeed's loader",
    "torch_autocast": 'the forward pass runs outside of DeepSpeed; use "bf16": {"enabled": true}',
    "hybrid_engine": "there is no generation during training",
    "compile": "the forward pass runs outside of DeepSpeed, which has nothing to compile",
    "weight_quantization": "it is for inference",
    "gradient_predivide_factor": "ZeRO divides gradients by parallel.data_parallel_size alone",
    "allgather_size": "use zero_optimization.allgather_bucket_size",
    "disable_allgather": "DeepSpeed reads it, and does nothing with it",
    "seq_parallel_communication_data_type": "the sequence is split by Megatron-core",
    "dataloader_drop_last": "samples are drawn by megatron_noloco, not by DeepSpeed's loader",
    "datastates_ckpt": "checkpoints are written by megatron_noloco, not by DeepSpeed",
    "aio": "nothing is kept on NVMe",
    "autotuning": "DeepSpeed's tuner cannot start this program",
}

# What must not be enabled, and why. DeepSpeed's monitors would write the learning rate of the first replica; its
# profilers look at forward and backward passes and at messages that are not DeepSpeed's here.
DISABLED = {
    "csv_monitor": "every replica has all its numbers in metrics.jsonl; leave it out",
    "comet": "use wandb or tensorboard",
    "flops_profiler": "it would see no forward pass; metrics.jsonl has speed/tflops_per_gpu",
    "prescale_gradients": "ZeRO divides gradients by parallel.data_parallel_size where it adds them up",
    "wall_clock_breakdown": "its forward and backward would be 0 ms; metrics.jsonl has the time of each phase",
    "comms_logger": "it would miss all messages but DeepSpeed's own; metrics.jsonl has bytes and waits",
}

# Refused by DeepSpeed 0.19 itself, but only after minutes of start-up.
REMOVED = _words("""
    amp compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula
    progressive_layer_drop quantize_training sparse_attention sparse_gradients
    """)

# The blocks for which DeepSpeed has a pydantic model, or we have: see deepspeed_models.
CHECKED = _words("""
    zero_optimization bf16 fp16 data_types csv_monitor comet comms_logger timers
    """)

# What DeepSpeed reads in its block `checkpoint`, whose name ours has.
CHECKPOINT = _words("""
    tag_validation checkpoint_serialization writer load_universal use_node_local_storage parallel_write
    """)

# What the optimizers take, under DeepSpeed's names for its own and torch's for the others.
_ADAM = _words("""
    lr betas eps weight_decay amsgrad bias_correction torch_adam adam_w_mode fp32_optimizer_states set_grad_none
    fused foreach maximize capturable differentiable
    """)
OPTIMIZER_PARAMS = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "muon": _words("lr muon_lr adam_lr momentum ns_method betas eps weight_decay"),
    "lion": _words("lr betas weight_decay fp32_optimizer_states set_grad_none"),
    "sgd": _words("lr momentum dampening weight_decay nesterov maximize foreach differentiable fused"),
    "rmsprop": _words(
        "lr alpha eps weight_decay momentum centered capturable foreach maximize differentiable"
    ),
    "adadelta": _words("lr rho eps weight_decay foreach capturable maximize differentiable"),
    "adamax": _words("lr betas eps weight_decay foreach maximize differentiable capturable"),
    "nadam": _words("""
        lr betas eps weight_decay momentum_decay decoupled_weight_decay foreach maximize capturable differentiable
        """),
    "radam": _words("""
        lr betas eps weight_decay decoupled_weight_decay foreach maximize capturable differentiable
        """),
}
# What all of them have besides, in Megatron's words; engine/ sets it on the groups of parameters.
GROUP_PARAMS = _words("""
    decoupled_lr start_weight_decay end_weight_decay weight_decay_incr_style weight_decay_incr_steps
    """)
# Of these, those that are no numbers (betas are two).
OPTIMIZER_SWITCHES = _words("""
    amsgrad bias_correction torch_adam adam_w_mode fp32_optimizer_states set_grad_none fused foreach maximize
    capturable differentiable decoupled_weight_decay nesterov centered
    """)

# Those that treat every weight by itself: ZeRO keeps the weights of a stage in flat vectors, where Lamb or
# Adafactor would not find their tensors; and Muon, for which engine/muon.py finds them. DeepSpeed's own ignore
# case; the others are names in torch.optim. Torch's schedules are no choice: they do not take the optimizer that
# ZeRO wraps around ours.
DEEPSPEED_OPTIMIZERS = _words("adam adamw lion muon")
TORCH_OPTIMIZERS = _words("Adadelta Adamax NAdam RAdam RMSprop SGD")

# DeepSpeed's own schedules and their parameters.
SCHEDULES = {
    "WarmupLR": _words("warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"),
    "WarmupDecayLR": _words("""
        total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration
        """),
    "WarmupCosineLR": _words("""
        total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration
        """),
    "LRRangeTest": _words("""
        lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase
        last_batch_iteration
        """),
    "OneCycle": _words("""
        cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size
        cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom
        cycle_max_mom decay_mom_rate last_batch_iteration
        """),
}
