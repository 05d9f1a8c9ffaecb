"""StarCoder2: a Mistral with LayerNorms, an MLP without a gate, and biases on all but embedding and head."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families.mistral import Mistral
from megatron_noloco.model.families.table import Parameter


class Starcoder2(Mistral):
    """StarCoder2 (Lozhkov et al. 2024, arXiv 2402.19173).

    The activation is GELU (Hendrycks & Gimpel 2016, arXiv 1606.08415) as approximated with tanh.
    """

    name = "starcoder2"
    normalization = "LayerNorm"
    hf_class = "Starcoder2ForCausalLM"
    hf_mlp = ("c_fc", "c_proj")
    hf_activation = "gelu_pytorch_tanh"
    hf_norm_epsilon = "norm_epsilon"
    # Core drops out at the embedding with the same probability, as the released models have it.
    hf_dropouts: ClassVar = {
        **Mistral.hf_dropouts,
        **dict.fromkeys(("embedding_dropout", "residual_dropout"), "hidden_dropout"),
    }

    def rows(self, architecture: Architecture) -> Sequence[Parameter]:
        rows: list[Parameter] = []
        for row in super().rows(architecture):
            rows += [row] if row.is_embedding_or_output else [row, row.bias]
        return rows

    def core_config(self, architecture: Architecture) -> dict[str, Any]:
        import torch.nn.functional as F

        return super().core_config(architecture) | {
            "activation_func": partial(F.gelu, approximate="tanh"),
            "add_bias_linear": True,
        }
