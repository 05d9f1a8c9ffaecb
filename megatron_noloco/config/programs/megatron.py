"""The arguments of Megatron-LM's pretrain_gpt.py, and those that Megatron-DeepSpeed adds."""

from math import log2

from megatron_noloco.config.programs.row import Carried, Program, Words, launcher, same, table

_CORE = "Megatron-core computes the same numbers; the fastest way here is chosen"
_REDUCE = "gradients are reduced once, after all microbatches, and weights are gathered once"
_MEMORY = (
    "a replica's weights are not divided over its data-parallel ranks: use tensor parallelism or pipeline stages, "
    "or attach around fully_shard (docs/library.md)"
)
_MODEL = "no model family here has it (docs/families.md); the model is trained without"
_EXPERTS = "experts here have no limit, no groups and a softmax; the model is trained without"
_ONE_RATE = "all weights have the rates of optimizer.params; leave it out"
_BATCH = "the batch is the same in all local steps; set it to that of the end"
_CHECKPOINTS = (
    "checkpoints here have a form of their own, and a run continues from training.output_dir by itself"
)
_PRETRAINED = "start from the model's Hugging Face folder: megatron-noloco import FOLDER --config THIS"
_TOKENIZER = "data.tokenizer_model names a folder with tokenizer.json"
_LOG = "metrics.jsonl and the log have a run's numbers; docs/watching.md has all"
_JOB = "the launcher and noloco decide it: docs/launchers.md, docs/exchange.md"
_OTHER = "it is of another program than pretraining"
_WHOLE = "the forward and backward pass are those of Megatron-core's schedules"

_CARRIED: Words = {
    **same(
        "model",
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length "
        "vocab_size make_vocab_size_divisible_by norm_epsilon untie_embeddings_and_output_weights init_method_std "
        "hidden_dropout attention_dropout rotary_base recompute_granularity recompute_method recompute_num_layers "
        "moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff rope_scaling_factor "
        "yarn_original_max_position_embeddings",
    ),
    "recompute_modules": Carried("model.recompute_modules", lambda v: [v] if isinstance(v, str) else v),
    "encoder_num_layers": Carried("model.num_layers"),
    "encoder_seq_length": Carried("model.seq_length"),
    "layernorm_epsilon": Carried("model.norm_epsilon"),
    "num_key_value_heads": Carried("model.num_query_groups"),
    "rotary_position_embeddings_theta": Carried("model.rotary_base"),
    "num_experts": Carried("model.num_moe_experts", lambda v: None if v == 1 else v),
    "num_moe_experts": Carried("model.num_moe_experts"),
    "moe_ffn_hidden_size": Carried("facts.expert_ffn_hidden_size"),
    "topk": Carried("model.moe_router_topk"),
    "moe_loss_coeff": Carried("model.moe_aux_loss_coeff"),
    "window_size": Carried("model.sliding_window", lambda v: int(str(v).strip("()[]").split(",")[0]) + 1),
    "recompute_activations": Carried("model.recompute_granularity", {True: "selective", False: None}),
    **dict.fromkeys(
        ("checkpoint_activations", "deepspeed_activation_checkpointing"),
        Carried(
            "model",
            {
                True: {
                    "recompute_granularity": "full",
                    "recompute_method": "uniform",
                    "recompute_num_layers": 1,
                },
                False: None,
            },
        ),
    ),
    "transformer_impl": Carried(
        "model.transformer_impl",
        {"local": "local", "transformer_engine": "auto", "inference_optimized": "auto"},
    ),
    "swiglu": Carried("facts.activation", {True: "swiglu", False: None}),
    "squared_relu": Carried("facts.activation", {True: "squared_relu", False: None}),
    "quick_geglu": Carried("facts.activation", {True: "quick_geglu", False: None}),
    "openai_gelu": Carried("facts.activation", {True: "gelu", False: None}),
    "activation_func": Carried(
        "facts.activation", {"gelu": "gelu", "swiglu": "swiglu", "squaredrelu": "squared_relu"}
    ),
    "normalization": Carried("facts.normalization", lambda v: {"rmsnorm": "RMSNorm"}.get(str(v).lower(), v)),
    "disable_bias_linear": Carried("facts.biases", {True: False, False: True}),
    "add_bias_linear": Carried("facts.biases"),
    "add_qkv_bias": Carried("facts.qkv_biases"),
    "qk_layernorm": Carried("facts.qk_norm"),
    "position_embedding_type": Carried("facts.position"),
    "use_rotary_position_embeddings": Carried("facts.position", {True: "rope", False: None}),
    "group_query_attention": Carried("facts.grouped"),
    "use_rope_scaling": Carried("facts.rope_scaling"),
    "micro_batch_size": Carried("train_micro_batch_size_per_gpu"),
    "global_batch_size": Carried("facts.global_batch_size"),
    "train_iters": Carried("training.train_iters"),
    "train_samples": Carried("facts.train_samples"),
    "train_tokens": Carried("facts.train_tokens"),
    "seed": Carried("training.seed"),
    "clip_grad": Carried("gradient_clipping"),
    "optimizer": Carried(
        "optimizer.type",
        {"adam": "AdamW", "sgd": "SGD", "muon": "Muon", "dist_muon": "Muon", "adaptive_muon": None},
    ),
    "lr": Carried("optimizer.params.lr"),
    "weight_decay": Carried("optimizer.params.weight_decay"),
    "adam_eps": Carried("optimizer.params.eps"),
    "adam_beta1": Carried("facts.beta1"),
    "adam_beta2": Carried("facts.beta2"),
    "sgd_momentum": Carried("facts.sgd_momentum"),
    "muon_momentum": Carried("facts.muon_momentum"),
    "lr_decay_style": Carried(
        "facts.schedule", {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "WSD"}
    ),
    "lr_warmup_iters": Carried("facts.warmup_steps"),
    "lr_warmup_samples": Carried("facts.warmup_samples"),
    "lr_warmup_tokens": Carried("facts.warmup_tokens"),
    "lr_warmup_fraction": Carried("facts.warmup_share"),
    "lr_decay_iters": Carried("facts.schedule_steps"),
    "lr_decay_samples": Carried("facts.schedule_samples"),
    "lr_decay_tokens": Carried("facts.schedule_tokens"),
    "lr_wsd_decay_iters": Carried("facts.decay_steps"),
    "lr_wsd_decay_samples": Carried("facts.decay_samples"),
    "lr_wsd_decay_style": Carried(
        "facts.decay_type", {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}
    ),
    "min_lr": Carried("facts.min_lr"),
    "bf16": Carried("bf16.enabled"),
    "fp16": Carried("fp16.enabled"),
    **same("fp16", "loss_scale loss_scale_window hysteresis"),
    "min_loss_scale": Carried("fp16.min_loss_scale", lambda v: int(v) if float(v).is_integer() else v),
    "initial_loss_scale": Carried("fp16.initial_scale_power", lambda v: round(log2(v))),
    "accumulate_allreduce_grads_in_fp32": Carried("data_types.grad_accum_dtype", {True: "fp32", False: None}),
    "grad_reduce_in_bf16": Carried("communication_data_type", {True: "bf16", False: None}),
    "zero_stage": Carried("zero_optimization.stage"),
    "zero_reduce_bucket_size": Carried("zero_optimization.reduce_bucket_size"),
    "zero_allgather_bucket_size": Carried("zero_optimization.allgather_bucket_size"),
    "zero_reduce_scatter": Carried("zero_optimization.reduce_scatter"),
    **same(
        "parallel",
        "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size sequence_parallel "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    ),
    "model_parallel_size": Carried("parallel.tensor_model_parallel_size"),
    "moe_expert_parallel_size": Carried("parallel.expert_model_parallel_size"),
    "decoder_first_pipeline_num_layers": Carried("parallel.num_layers_in_first_pipeline_stage"),
    "decoder_last_pipeline_num_layers": Carried("parallel.num_layers_in_last_pipeline_stage"),
    "num_virtual_stages_per_pipeline_rank": Carried("parallel.virtual_pipeline_model_parallel_size"),
    "virtual_pipeline_model_parallel_size": Carried("parallel.virtual_pipeline_model_parallel_size"),
    "num_layers_per_virtual_pipeline_stage": Carried("facts.virtual_layers"),
    **launcher(),
    "data_path": Carried("data.data_path", lambda v: list(map(str, v)) if isinstance(v, list) else str(v)),
    "train_data_path": Carried(
        "data.train_data_path", lambda v: list(map(str, v)) if isinstance(v, list) else v
    ),
    "valid_data_path": Carried(
        "data.valid_data_path", lambda v: list(map(str, v)) if isinstance(v, list) else v
    ),
    "split": Carried("data.split", lambda v: str(v).strip("'\"").replace(" ", "")),
    "tokenizer_type": Carried("facts.tokenizer_kind"),
    "tokenizer_model": Carried("facts.tokenizer_file"),
    **same("data", "reset_attention_mask eod_mask_loss"),
    "save": Carried("training.output_dir"),
    "save_interval": Carried("checkpoint.save_interval"),
    "persistent_save_interval": Carried("checkpoint.save_interval"),
    "async_save": Carried("checkpoint.async_save"),
    "eval_interval": Carried("evaluation.interval"),
    "eval_iters": Carried("facts.evaluated_batches"),
    "full_validation": Carried("evaluation.full"),
    "log_interval": Carried("training.log_interval"),
    "exit_duration_in_mins": Carried("training.exit_duration_minutes"),
    "tensorboard_dir": Carried("tensorboard.enabled", bool),
    "wandb_project": Carried("wandb", lambda v: {"enabled": True, "project": v} if v else None),
    "wandb_entity": Carried("wandb.team"),
    "wandb_exp_name": Carried("wandb.group"),
}

_MEANINGLESS = {
    "rotary embeddings need no longest length": """
        max_position_embeddings no_position_embedding add_position_embedding
    """,
    "the norms' weights begin at 1, which is the same function": """
        apply_layernorm_1p layernorm_zero_centered_gamma
    """,
    _EXPERTS.partition(";")[0]: """
        moe_token_drop_policy moe_router_bias_update_rate disable_moe_token_dropping
        moe_upcycling_granularity disable_moe_top2_2nd_expert_sampling create_moe_param_group
    """,
    "it is for Python that calls Megatron-core, and null in a file": """
        init_method output_layer_init_method timers params_dtype pipeline_dtype *_func enable_autocast
        autocast_dtype variable_seq_lengths num_microbatches_with_partial_* batch_p2p_*
        barrier_with_l1_time _cpu_offloading_context gated_linear_unit moe_token_dropping
        check_for_nan_in_loss_and_grad enable_one_logger
    """,
    _CORE: """
        attention_backend moe_router_dtype use_flash_attn* no_masked_softmax_fusion no_bias_*_fusion
        no_rope_fusion cross_entropy_* use_mcore_models use_legacy_models no_persist_layer_norm onnx_safe
        persist_layer_norm no_gradient_accumulation_fusion attention_softmax_in_fp32
        no_query_key_layer_scaling moe_grouped_gemm moe_use_legacy_grouped_gemm moe_token_dispatcher_type
        moe_permute_fusion moe_router_fusion moe_per_layer_logging moe_shared_expert_overlap
        moe_enable_deepep moe_deepep_num_sms moe_flex_* moe_layer_recompute moe_router_padding_for_*
        moe_extended_tp use_fused_weighted_squared_relu use_te_activation_func
        no_clone_scatter_output_in_embedding te_* transformer_engine_* bias_*_fusion masked_softmax_fusion
        memory_efficient_layer_norm clone_scatter_output_in_embedding gradient_accumulation_fusion
        apply_rope_fusion disable_mem_efficient_ln use_tutel fused_* disable_bf16_reduced_precision_matmul
        fp16_lm_cross_entropy fp32_residual_connection normalize_* distribute_saved_activations
        distribute_checkpointed_activations checkpoint_num_layers ds_fused_adam
    """,
    "no graph is recorded": "cuda_graph_* optimizer_cuda_graph",
    "numbers are bf16, fp16 or fp32": """
        fp8_* no_fp8_* fp4_* first_last_layers_bf16 num_layers_at_*_in_bf16 keep_fp8_*
        reuse_grad_buf_for_mxfp8_* kitchen_*
    """,
    "zero_optimization.stage 1 is the default; leave it out": "use_distributed_optimizer",
    "the inner optimizer works where the model is": """
        optimizer_offload_fraction cpu_torch_adam use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d no_pin_cpu_*
    """,
    "a resumed run takes the rates of its config": """
        override_opt_param_scheduler use_checkpoint_opt_param_scheduler no_load_lr_state
    """,
    "each token of a sample without padding counts the same": "calculate_per_token_loss",
    "steps that are not finite are always skipped and counted (docs/optimizers.md)": """
        no_check_for_nan_in_loss_and_grad check_for_* rerun_* error_injection_* lion_beta*
    """,
    "distillation is not supported": """
        kd_* num_layers_teacher num_experts_teacher hidden_size_teacher num_attention_heads_teacher
        reset_iteration
    """,
    _MEMORY.partition(":")[0]: """
        fsdp_* megatron_fsdp_* torch_fsdp2_* init_model_with_meta_device enable_full_sharding_in_hsdp
        num_distributed_optimizer_instances zero_contigious_gradients use_layer_wise_distributed_optimizer
        no_use_layer_wise_param_layout
    """,
    _REDUCE: """
        overlap_grad_reduce overlap_param_gather* no_align_* ddp_* defer_embedding_* wgrad_deferral_limit
        delay_wgrad_compute overlap_moe_* suggested_communication_unit_size no_gradient_reduce_div_fusion
        gtp_* align_* check_weight_hash_across_*
    """,
    _WHOLE: """
        overlap_p2p_* no_overlap_p2p_* no_scatter_gather_* scatter_gather_* tp_comm_* disable_tp_comm_*
        microbatch_group_size_* use_ring_exchange_p2p no_async_tensor_* deallocate_pipeline_outputs
        enable_zbh1_* no_pipeline_parallel pipeline_model_parallel_comm_backend standalone_embedding_stage
        cp_comm_type hierarchical_context_parallel_sizes force_ds_sequence_parallel
        ds_sequence_parallel_fpdt* partition_activations contigious_checkpointing checkpoint_in_cpu
        synchronize_each_layer profile_backward scattered_embeddings split_transformers
        memory_centric_tiled_linear tile_factor
    """,
    _JOB: """
        local_rank ddp_impl no_contiguous_buffers_in_local_ddp distributed_backend distributed_timeout_*
        nccl_* use_nccl_ub use_sharp sharp_* disable_gloo_* high_priority_stream_groups
        use_tp_pp_dp_mapping replication* inprocess_* use_same_sampling_seed_across_dp_ranks
        enable_ft_package calc_ft_timeouts ft_* initialize_socket_comms lazy_mpu_init
        use_cpu_initialization disable_symmetric_registration create_all_gather_group fake_process_group
        manual_gc* no_manual_gc_eval empty_unused_memory_level data_parallel_random_init
        perform_initialization no_initialization train_sync_interval adlr_autoresume* exit_signal_handler*
        kill_switch_file deepspeed deepspeed_config deepspeed_mpi deepscale* use_pin_memory
    """,
    "rotary embeddings know differences of positions only, so documents are told apart by "
    "data.reset_attention_mask alone; leave it out": "reset_position_ids",
    "the test part is never read": "test_data_path",
    "reading and the order of samples follow from training.seed (docs/data.md)": """
        dataloader_* num_workers data_cache_path data_impl mmap_warmup no_mmap_bin_files
        no_create_attention_mask_in_dataloader num_dataset_builder_threads mid_level_dataset_surplus
        object_storage_cache_path sample_rate per_dataset_sequences_path return_data_index
        train_*_idx_path train_idx_path train_desc_path repeated_dataloader use_dataset_only
        aml_data_download_path fim_* varlen_* full_validation_* s3_cache_path
    """,
    "a tokenizer is its folder's tokenizer.json": """
        tiktoken_* padded_vocab_size trust_remote_code sft_tokenizer_prompt_format tokenizer_*
        allow_ambiguous_pad_tokens no_use_tokenizer_model_from_checkpoint_args
    """,
    _CHECKPOINTS: """
        load no_load_* no_save_* load_* ckpt_* dist_ckpt_* use_dist_ckpt auto_detect_ckpt_format
        non_persistent_* save_retain_interval use_persistent_ckpt_worker use_checkpoint_args
        use_mp_args_from_checkpoint_args exit_on_missing_checkpoint no_strict_fsdp_dtensor_load no_ckpt_*
        checkpoint_*
    """,
    _LOG: """
        log_* no_log_* timing_log_* tensorboard_* wandb_* one_logger_* no_one_logger app_tag_*
        config_logger_dir logging_level profile profile_* use_pytorch_profiler nvtx_*
        record_memory_history memory_snapshot_path no_barrier_with_level_1_timing
        disable_straggler_on_startup straggler_* run_workload_inspector_server otel_*
        result_rejected_tracker_filename dump_param_to_param_group_map
    """,
    "the same ranks, seed and versions give the same numbers on CPUs": "deterministic_mode",
    _OTHER: """
        inference* max_tokens_to_oom output_bert_embeddings bert_* flash_decode retro_* symmetric_ar_type
        nccl_all_reduce_for_prefill mlp_chunks_for_prefill decode_only_* rl_* grpo_* langrl_*
        perform_rl_step ict_* biencoder_* titles_data_path query_in_block_prob use_one_sent_docs
        evidence_data_path retriever_* block_data_path embedding_path indexer_* num_classes img_*
        num_channels patch_dim classes_fraction data_per_class_fraction no_data_sharding vision_* swin_*
        mask_* iter_per_epoch dino_* decoder_num_layers decoder_seq_length short_seq_prob
        enable_experimental disable_msc enable_msc enable_chunked_* num_speculative_tokens
        use_legacy_static_engine cache_mla_latents refit_method ds_inference output_logit_dtype yaml_cfg
        disable_mamba_* mla_down_proj_fusion cpu_offloading*
    """,
}

_NO_EQUAL = {
    _MODEL: """
        rotary_percent=1.0 rope_type=rope moe_layer_freq=1 expert_interval=1 mscale=1
        rotary_scaling_factor=1 rotary_interleaved rotary_seq_len_interpolation_factor no_rope_freq
        mrope_section apply_residual_connection_post_layernorm qk_l2_norm multi_latent_attention
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mscale_all_dim
        embedding_weights_in_fp32 mtp_* moe_shared_expert_intermediate_size heterogeneous_layers_* spec
        hybrid_* mamba_* is_hybrid_model linear_attention_freq window_attn_skip_freq relative_attention_*
        vocab_extra_ids embedding_init_method_std init_method_xavier_uniform mup_* mlp_type
        moe_latent_size softmax_type attention_output_gate experimental_attention_variant yarn_beta_*
        yarn_correction_* no_yarn_correction_* experts_per_* num_experts_switch
        apply_query_key_layer_scaling
    """,
    _EXPERTS: """
        moe_router_score_function=softmax moe_router_topk_scaling_factor=1.0 moe_router_num_groups
        moe_router_group_topk moe_router_enable_expert_bias moe_z_loss_coeff moe_input_jitter_eps
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_apply_probs_on_input
        moe_use_upcycling moe_train_capacity_factor moe_eval_capacity_factor moe_min_capacity
        moe_router_force_load_balancing moe_router_pre_softmax
    """,
    "a graph would freeze the routes": """
        enable_cuda_graph=none external_cuda_graph=none cuda_graph_impl=none
    """,
    'its scales would be reduced over all replicas; use "bf16": {"enabled": true}': """
        fp8 fp8_format fp8_e4m3 fp8_hybrid fp4_format fp4
    """,
    _ONE_RATE: """
        decoupled_lr decoupled_min_lr start_weight_decay end_weight_decay head_lr_mult lr_warmup_init
        no_weight_decay_cond_type apply_wd_to_qk_layernorm embedding_lr_multiplier
        weight_decay_incr_style=constant
    """,
    _BATCH: """
        decrease_batch_size_if_needed rampup_batch_size step_batch_size_schedule iterations_to_skip
        phase_transition_iterations
    """,
    "the step is DeepSpeed's (docs/optimizers.md): search its rates with tune": "muon_*",
    "states are fp32; DeepSpeed divides them over the data-parallel ranks": """
        use_precision_aware_optimizer=fp32 exp_avg_dtype=fp32 exp_avg_sq_dtype=fp32 main_params_dtype=fp32
        main_grads_dtype=fp32
    """,
    "the inner optimizer works where the model is": "optimizer_cpu_offload cpu_optimizer",
    "samples have the same length in all local steps": """
        data_efficiency_curriculum_learning random_ltd curriculum_learning*
    """,
    "distillation is not supported": "kd mos load_teacher logits_*",
    "a sequence stays whole but for parallel.sequence_parallel": """
        context_parallel_size=1 ds_sequence_parallel_size=1
    """,
    "experts are cut by parallel.tensor_model_parallel_size, as other layers": """
        expert_tensor_parallel_size=1 enable_expert_tensor_parallelism=1
    """,
    "layers are divided by parallel.num_layers_in_first_pipeline_stage and its neighbours": """
        pipeline_model_parallel_layout pipeline_model_parallel_split_rank
    """,
    _MEMORY: """
        use_megatron_fsdp=no_shard use_torch_fsdp2=no_shard use_custom_fsdp=no_shard
        data_parallel_sharding_strategy=no_shard outer_dp_sharding_strategy=no_shard
        remote_device=no_shard
    """,
    _TOKENIZER: "vocab_file merge_file",
    "set data.sft_data_path: a file or folder of JSON lines with messages": "sft",
    "set data.text, or data.data_path (docs/data.md)": """
        mock_data data_args_path fim_data per_split_data_args_path multiple_validation_sets
        train_data_exact_num_epochs
    """,
    _PRETRAINED: """
        pretrained_checkpoint finetune ckpt_step load_tag universal_checkpoint override_ckpt_iteration
        freeze_all_layers
    """,
    "megatron-noloco stop ends a run; training.exit_duration_minutes does, too": "exit_interval",
    "megatron-noloco evaluate prints the loss of a checkpoint": "skip_train test_mode",
}


_DEFAULTS = {
    "optimizer": "adam",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "weight_decay": 0.01,
    "sgd_momentum": 0.9,
    "clip_grad": 1.0,
    "lr_decay_style": "linear",
    "initial_loss_scale": 2**32,
    "seed": 1234,
    "split": "969,30,1",
    "log_interval": 100,
    "eval_interval": 1000,
    "eval_iters": 100,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "untie_embeddings_and_output_weights": False,
    "moe_aux_loss_coeff": 0.0,
    "swiglu": False,
    "normalization": "LayerNorm",
    "disable_bias_linear": False,
    "position_embedding_type": "learned_absolute",
}


MEGATRON = Program("Megatron-LM", table(_CARRIED, _MEANINGLESS, _NO_EQUAL), _DEFAULTS)
