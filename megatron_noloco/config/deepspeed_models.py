"""DeepSpeed's own pydantic models check its blocks of the file: the one module here that imports DeepSpeed.

That takes two seconds, so it is done when a file has such a block, and only once. DeepSpeed's models are lax ("1"
is 1) and turn into others on construction; so a strict twin with the same fields checks names, types and bounds,
and the model itself only the rules between its fields.
"""

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import to_json

from megatron_noloco.config.blocks import Block
from megatron_noloco.config.deepspeed_values import Dtype
from megatron_noloco.config.wording import Problem, problems_of
from megatron_noloco.job.start_up import before_engines


class DataTypes(Block):
    """DeepSpeed has no model for this block, and would take "int8"."""

    grad_accum_dtype: Dtype | None = Field(default=None)
    param_dtype: Dtype | None = Field(default=None)
    buffer_dtype: Dtype | None = Field(default=None)
    keep_in_fp32_modules: list[str] | None = Field(default=None)


def problems_in(block: str, value: dict[str, Any]) -> Iterator[Problem]:
    """What is wrong with one of the CHECKED blocks, "auto" left out."""
    model, twin = _models()[block]
    whole = _whole_numbers(value)
    try:
        twin.model_validate_json(_json(whole))
    except ValidationError as error:
        yield from problems_of(error, twin, block)
        return
    try:
        model.model_validate(whole)
    except ValidationError as error:
        yield from problems_of(error, model, block)


def _json(value: Any) -> bytes:
    """In JSON, unlike in Python, pydantic's strict mode takes an enumeration's value for its member."""
    return to_json(value, inf_nan_mode="constants")


def _whole_numbers(value: Any) -> Any:
    """5e8 is an integer to DeepSpeed, whose users write it so."""
    if isinstance(value, dict):
        return {name: _whole_numbers(inner) for name, inner in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


@cache
def _models() -> dict[str, tuple[type[BaseModel], type[BaseModel]]]:
    """By block, DeepSpeed's model and its strict twin."""
    before_engines()
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models: dict[str, type[BaseModel]] = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "data_types": DataTypes,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "comms_logger": CommsLoggerConfig,
        "timers": create_model("Timers", throughput=(DeepSpeedThroughputTimerConfig | None, None)),
    }
    return {block: (model, _strict(model)) for block, model in models.items()}


def _strict(model: type[BaseModel]) -> type[BaseModel]:
    """The same fields, without the constructor and the validators of the model."""
    settings = ConfigDict(
        extra="forbid",
        strict=True,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )
    fields: dict[str, Any] = {
        name: (_strict_type(field.annotation), field) for name, field in model.model_fields.items()
    }
    return create_model(model.__name__, __config__=settings, **fields)


def _strict_type(annotation: Any) -> Any:
    """An annotation with every model in it, which may be optional, replaced by its twin."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _strict(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return Union[tuple(map(_strict_type, get_args(annotation)))]  # noqa: UP007
    return annotation
