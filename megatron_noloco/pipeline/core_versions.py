"""What differs between the supported versions of Megatron-core, 0.16.1 to 0.19; nothing else asks for it."""

from functools import partial
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

try:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
except ImportError:  # before 0.18
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    get_moe_metrics_tracker = None

# The field of TransformerConfig that says what CUDA graphs capture: nothing. Its default is a deprecated value.
_GRAPHS = ("cuda_graph_modules", "cuda_graph_scope")  # since 0.18; before
NO_CUDA_GRAPHS: dict[str, Any] = {
    next(name for name in _GRAPHS if name in TransformerConfig.__dataclass_fields__): []
}


def balancing_losses() -> list[Tensor]:
    """Return the tensors [layers] to which core's routers add their balancing losses, for core's log."""
    if get_moe_metrics_tracker is None:
        return [entry["values"] for entry in get_moe_layer_wise_logging_tracker().values()]
    return [entry.values for entry in get_moe_metrics_tracker().metrics.values()]


def submodules_of(spec: Any) -> Any:
    """Return the submodules of a module's specification: a `ModuleSpec`, or since 0.18 a `partial`."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
