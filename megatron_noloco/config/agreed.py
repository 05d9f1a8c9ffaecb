"""The fields of a config that a newcomer takes from the job that invites: all others are its own.

No field in the list holds a path, an address, a command or any other free text. A new field of the config is not
taken before it is in the list, which a test compares with the config.
"""

from collections.abc import Iterator
from typing import Any

from megatron_noloco.data.sources import STANDARD_LIBRARY

_OF_BLOCK = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping "
    "communication_data_type zero_allow_untested_optimizer",
    "optimizer": "type",
    "optimizer.params": "lr weight_decay betas eps adam_w_mode torch_adam fused muon_lr adam_lr momentum "
    "ns_method nesterov",
    "scheduler": "type",
    "scheduler.params": "total_num_steps warmup_num_steps warmup_type warmup_min_lr warmup_max_lr "
    "warmup_min_ratio cos_min_ratio decay_num_steps decay_type min_ratio",
    "bf16": "enabled",
    "fp16": "enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale",
    "data_types": "grad_accum_dtype",
    "zero_optimization": "stage reduce_bucket_size allgather_bucket_size reduce_scatter "
    "use_multi_rank_bucket_allreduce contiguous_gradients",
    "noloco": "method local_steps outer_momentum outer_lr outer_nesterov consensus_weight group_size pairing "
    "site_interval deadline_seconds payload slow_weights fragments overlap_steps recipe final_average",
    "model": "family num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "seq_length vocab_size make_vocab_size_divisible_by rotary_base norm_epsilon "
    "untie_embeddings_and_output_weights init_method_std yarn_rotary_scaling_factor "
    "yarn_original_max_position_embeddings rope_scaling_factor sliding_window num_moe_experts moe_router_topk "
    "moe_router_load_balancing_type moe_aux_loss_coeff hidden_dropout attention_dropout z_loss_coeff "
    "recompute_granularity recompute_method recompute_num_layers recompute_modules transformer_impl",
    "federation": "shortest_deadline_seconds rounds_behind skip_local_steps start_with",
    "data": "sft_packing tokenizer_type split_special_tokens prepend_bos split reset_attention_mask "
    "eod_mask_loss",
    "training": "train_iters seed log_interval watchdog_seconds",
    "checkpoint": "save_interval",
    "evaluation": "interval iters full",
}
AGREED = {
    (*filter(None, block.split(".")), name) for block, names in _OF_BLOCK.items() for name in names.split()
}
_HERE = ("data", "text"), STANDARD_LIBRARY  # every machine has it


def divided(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the part of a config that all machines share, and the names of the fields that are left out."""
    agreed, left_out = dict[str, Any](), list[str]()
    for path, value in _leaves(config):
        if path in AGREED or (path, value) == _HERE:
            block = agreed
            for name in path[:-1]:
                block = block.setdefault(name, {})
            block[path[-1]] = value
        else:
            left_out.append(".".join(path))
    return agreed, left_out


def names_in(config: dict[str, Any]) -> list[str]:
    """Return the dotted names of all fields of a config."""
    return [".".join(path) for path, _ in _leaves(config)]


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, value
