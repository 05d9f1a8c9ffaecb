"""What DeepSpeed takes where it has no model: another value ends in a traceback of every rank, or is replaced by
DeepSpeed's default without a word.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_noloco.config.blocks import NonNegative, Positive

Dtype = Literal["fp32", "bf16", "fp16"]

_Size = Annotated[float, Field(ge=0)]
_Ratio = Annotated[float, Field(ge=0, le=1)]
_Momentum = Annotated[float, Field(ge=0, lt=1)]

# Top-level keys, by the type of their value.
TOP_LEVEL: dict[str, Any] = {
    "managed_gradient_accumulation": bool,
    "communication_data_type": Dtype | None,
    "prescale_gradients": bool,
    "gradient_allreduce_op": Literal["mean", "sum"],
    "gradient_clipping": _Size,
    "zero_allow_untested_optimizer": bool,
    "zero_force_ds_cpu_optimizer": bool,
    "steps_per_print": Positive | None,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "log_level": Literal["debug", "info", "warning", "error", "critical"] | None,
    "vocabulary_size": Positive | None,
    "use_data_before_expert_parallelism": bool,
    "disable_python_gc": bool,
}

# Parameters of its schedules; a name means the same in all that have it.
SCHEDULE: dict[str, Any] = {
    "total_num_steps": Positive | Literal["auto"],
    "warmup_num_steps": Positive,
    "warmup_type": Literal["log", "linear"],
    "warmup_min_lr": _Size,
    "warmup_max_lr": _Size,
    "warmup_min_ratio": _Ratio,
    "cos_min_ratio": _Ratio,
    "lr_range_test_min_lr": _Size,
    "lr_range_test_step_size": Positive,
    "lr_range_test_step_rate": _Size,
    "lr_range_test_staircase": bool,
    "cycle_min_lr": _Size,
    "cycle_max_lr": _Size,
    "cycle_first_step_size": Positive,
    "cycle_second_step_size": NonNegative,
    "cycle_first_stair_count": NonNegative,
    "cycle_second_stair_count": NonNegative,
    "cycle_momentum": bool,
    "cycle_min_mom": _Momentum,
    "cycle_max_mom": _Momentum,
    "decay_step_size": NonNegative,
    "decay_lr_rate": _Size,
    "decay_mom_rate": _Size,
    "last_batch_iteration": Annotated[int, Field(ge=-1)],
}
# Of these, those without a default.
REQUIRED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr")
