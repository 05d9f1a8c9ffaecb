"""What a user of Megatron, Hugging Face or DiLoCo may write, and what it is here.

docs/running.md has the same names; a test compares them.
"""

# The name (in one block alone: with the block), in small letters: the field that is meant.
MEANT = {
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "num_micro_batches": "gradient_accumulation_steps",
    "clip_grad": "gradient_clipping",
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "dp": "parallel.data_parallel_size",
    "vpp": "parallel.virtual_pipeline_model_parallel_size",
    "noloco.k": "noloco.local_steps",
    "noloco.h": "noloco.local_steps",
    "inner_steps": "noloco.local_steps",
    "sync_every": "noloco.local_steps",
    "noloco.alpha": "noloco.outer_momentum",
    "noloco.beta": "noloco.outer_lr",
    "outer_learning_rate": "noloco.outer_lr",
    "noloco.gamma": "noloco.consensus_weight",
    "num_hidden_layers": "model.num_layers",
    "intermediate_size": "model.ffn_hidden_size",
    "num_key_value_heads": "model.num_query_groups",
    "head_dim": "model.kv_channels",
    "max_position_embeddings": "model.seq_length",
    "rope_theta": "model.rotary_base",
    "rms_norm_eps": "model.norm_epsilon",
}
# Where no field is meant, what to know instead.
TOLD = {
    "global_batch_size": "train_batch_size counts the samples of ONE replica; all replicas together take "
    "parallel.replicas times as many",
    "tie_word_embeddings": "model.untie_embeddings_and_output_weights says the opposite",
}
NOT_SUPPORTED = {
    "context_parallel_size": "a sequence stays whole but for parallel.sequence_parallel",
    "expert_model_parallel_size": "experts are split by parallel.tensor_model_parallel_size",
    "fp8": 'its scales would be reduced over all replicas; use "bf16": {"enabled": true}',
    "cuda_graph_impl": "a graph would freeze the routes",
    "enable_cuda_graph": "a graph would freeze the routes",
    "onebitadam": "it does not work with ZeRO; use AdamW, and noloco.payload for smaller exchanges",
}


def hint(dotted: str) -> str:
    """What to tell of a key or a type of this dotted name that is not known; "" if nothing is."""
    for name in (dotted.lower(), dotted.lower().rpartition(".")[2]):
        if name in MEANT:
            return f"did you mean {MEANT[name]}?"
        if name in NOT_SUPPORTED:
            return f"not supported: {NOT_SUPPORTED[name]}"
        if name in TOLD:
            return TOLD[name]
    return ""
