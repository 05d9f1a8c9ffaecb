"""Names of DiLoCo and other papers, of Hugging Face's configs of models, and short names."""

from megatron_noloco.config.programs.row import Carried, Program, Words, table
from megatron_noloco.model.families import FAMILIES

_SIZES: Words = {
    theirs: Carried(f"model.{ours}")
    for family in FAMILIES.values()
    for ours, theirs in family.hf_sizes.items()
    if theirs != ours
}

_FIELDS = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "num_micro_batches",
    "parallel.tensor_model_parallel_size": "tp tensor_parallel",
    "parallel.pipeline_model_parallel_size": "pp pipeline",
    "parallel.data_parallel_size": "dp",
    "parallel.expert_model_parallel_size": "ep expert_parallel",
    "parallel.virtual_pipeline_model_parallel_size": "vpp",
    "parallel.sequence_parallel": "sequence_parallel_size",
    "noloco.local_steps": "noloco.k noloco.h inner_steps sync_every",
    "noloco.outer_momentum": "noloco.alpha",
    "noloco.outer_lr": "noloco.beta outer_learning_rate",
    "noloco.consensus_weight": "noloco.gamma",
    "model.num_moe_experts": "num_local_experts",
    "model.moe_router_topk": "num_experts_per_tok",
    "model.rotary_base": "rope_theta",
    "model.norm_epsilon": "rms_norm_eps",
}
_MEANINGLESS = {
    "model.family decides it; leave it out": """
        hidden_act activation_func gated_linear_unit use_bias attention_bias mlp_bias add_bias_linear
    """,
    "model.untie_embeddings_and_output_weights says the opposite": "tie_word_embeddings",
    "all jobs show certificates of federation.key_file; leave it out": "federation.encryption",
    "set data.text, or see docs/data.md": "data.path data.file data.files dataset",
}
_NO_EQUAL = {
    'its scales would be reduced over all replicas; use "bf16": {"enabled": true}': "fp8",
    "it does not work with ZeRO; use AdamW, and noloco.payload for smaller exchanges": "onebitadam",
    "use AdamW": "adadelta adamax nadam radam rmsprop",
    "use WSD": "lrrangetest onecycle",
}

OTHERS = Program(
    "DiLoCo, of models of Hugging Face, and short names",
    table(
        _SIZES | {name: Carried(field) for field, names in _FIELDS.items() for name in names.split()},
        _MEANINGLESS,
        _NO_EQUAL,
    ),
)
