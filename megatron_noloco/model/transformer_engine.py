"""Whether layers come from Transformer Engine; without Megatron-core, whose import takes seconds."""

import importlib.util

import torch


def uses_transformer_engine(transformer_impl: str) -> bool:
    """Whether it is installed, on a GPU, and not declined.

    Raises ValueError when it is demanded and cannot be had.
    """
    available = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    if transformer_impl == "transformer_engine" and not available:
        raise ValueError(
            'model.transformer_impl is "transformer_engine", which needs a GPU and the transformer_engine '
            'package; use "auto" or "local"'
        )
    return available and transformer_impl != "local"
