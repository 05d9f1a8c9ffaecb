"""DeepSpeed's JSON."""

from megatron_noloco.config.programs.row import Carried, Program, Words, same, table, within

_AUTOCAST = Carried("", lambda block: {"bf16.enabled": True} if block.get("enabled") else None)
_CARRIED: Words = {
    "train_batch_size": Carried("facts.global_batch_size"),
    **same("", "train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"),
    **same("", "communication_data_type optimizer scheduler zero_allow_untested_optimizer"),
    **within(
        "zero_optimization",
        same(
            "zero_optimization",
            "stage reduce_bucket_size allgather_bucket_size reduce_scatter use_multi_rank_bucket_allreduce "
            "contiguous_gradients",
        ),
    ),
    "bf16.enabled": Carried("bf16.enabled"),
    "bfloat16.enabled": Carried("bf16.enabled"),
    **within(
        "fp16",
        same(
            "fp16",
            "enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
            "min_loss_scale",
        ),
    ),
    "torch_autocast": _AUTOCAST,
    "amp": _AUTOCAST,
    "data_types.grad_accum_dtype": Carried("data_types.grad_accum_dtype"),
    "steps_per_print": Carried("facts.print_every"),
    "tensorboard.enabled": Carried("tensorboard.enabled"),
    **within("wandb", same("wandb", "enabled project group team")),
}
_ZERO_MEANINGLESS = {
    "gradients are reduced once, after all microbatches": "overlap_comm round_robin_gradients",
    "it is of ZeRO stage 3": """
        sub_group_size prefetch_bucket_size param_persistence_threshold model_persistence_threshold
        max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save
        module_granularity_threshold use_all_reduce_for_fetch_params stage3_* zero_hpz_partition_size
        zero_quantized_* memory_efficient_linear override_module_apply log_trace_cache_warnings
        leaf_module allgather_sequential mics_*
    """,
    "it does not change the numbers": """
        allgather_partitions load_from_fp32_weights elastic_checkpoint ignore_unused_parameters
        legacy_stage1 cpu_offload_use_pin_memory pipeline_loading_checkpoint enable_sanity_checks
        compute_grad_norm save_muon_momentum_buffer_in_memory parameter_alignment
    """,
}
_ZERO_NO_EQUAL = {
    "the inner optimizer works where the model is; the outer one's weights are in host memory already "
    '(noloco.slow_weights "host")': "offload_optimizer offload_param cpu_offload cpu_offload_param zenflow",
}
_MEANINGLESS = {
    "logs are in training.output_dir": "tensorboard.*",
    "each replica has all its numbers in metrics.jsonl": "csv_monitor",
    "use wandb or tensorboard": "comet",
    "metrics.jsonl has speed/tflops_per_gpu": "flops_profiler",
    "metrics.jsonl has the time of each phase": "wall_clock_breakdown",
    "metrics.jsonl has bytes and waits": "comms_logger",
    "model.recompute_granularity decides it": "activation_checkpointing",
    "the mean over the ranks is the same": "prescale_gradients gradient_predivide_factor",
    "gradients are dense": "sparse_gradients disable_allgather",
    "Megatron-core has the attention and the pipeline": "sparse_attention pipeline",
    "gradients that are not finite are always found": "check_overflow fp16.auto_cast",
    "the block checkpoint here has other fields": "checkpoint checkpoint_engine datastates_ckpt",
    "it changes what is printed, or how it is computed": """
        dump_state memory_breakdown log_level disable_python_gc zero_force_ds_cpu_optimizer nebula aio
        timers fp16.fp16_master_weights_and_grads graph_harvesting dataloader_drop_last timeout
        hybrid_engine use_data_before_expert_parallelism seq_parallel_communication_data_type
    """,
}
_NO_EQUAL = {
    "the forward pass runs outside of DeepSpeed; leave it out": "compile torch_compile",
    "set parallel.tensor_model_parallel_size": "tensor_parallel",
    "a sequence stays whole but for parallel.sequence_parallel": "sequence_parallel_size=1",
    "samples have the same length in all local steps": "curriculum_learning",
    "it would change what is trained; leave it out": """
        data_efficiency compression_training progressive_layer_drop eigenvalue quantize_training
    """,
    "start separate jobs (the block federation): replicas come and go": "elasticity",
    "`megatron-noloco tune` searches learning rates, `plan` shows memory": "autotuning",
    "master weights and states are fp32": """
        bf16.immediate_grad_update bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
        bf16.check_grad_overflow
    """,
    "gradients are averaged": "gradient_allreduce_op=mean",
}

DEEPSPEED = Program(
    "DeepSpeed",
    table(_CARRIED, _MEANINGLESS, _NO_EQUAL)
    | within("zero_optimization", table({}, _ZERO_MEANINGLESS, _ZERO_NO_EQUAL)),
)
