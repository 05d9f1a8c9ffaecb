"""Kernels that take the place of torch's: each against torch's, where it is installed."""

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.ops.adam import FusedAdam

from megatron_noloco.engine.initialize import deepspeed_settings
from megatron_noloco.model.layers import CausalAttention, document_mask, fused_rms_norm_affine
from tests.gpu.training import trained
from tests.kit.tiny import build, tiny

pytestmark = pytest.mark.gpu


def test_fused_adam_is_adamw() -> None:
    if deepspeed_settings({"optimizer": {"type": "AdamW", "params": {}}})["optimizer"]["params"][
        "torch_adam"
    ]:
        pytest.skip("DeepSpeed's FusedAdam cannot be had: that takes nvcc and ninja")
    weights = torch.randn(100_003, device="cuda")
    own, expected = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    params: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    fused, plain = FusedAdam([own], adam_w_mode=True, **params), torch.optim.AdamW([expected], **params)
    for _ in range(10):
        own.grad = torch.randn_like(own)
        expected.grad = own.grad.clone()
        fused.step()
        plain.step()
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_transformer_engine_trains_like_the_local_layers(precision: str) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")
    changes = {} if precision == "fp32" else {"bf16": {"enabled": True}}
    local, _, _ = trained(changes)
    found, _, _ = trained({**changes, "model": {"transformer_impl": "transformer_engine"}})
    assert found == pytest.approx(local, abs=0.02 if precision == "fp32" else 0.05)  # TF32


def test_apex_has_the_same_norm() -> None:
    if fused_rms_norm_affine is None:
        pytest.skip("NVIDIA's apex is not installed")
    hidden, weight = torch.randn(8, 64, 256, device="cuda"), torch.rand(256, device="cuda")
    found = fused_rms_norm_affine(hidden, weight, weight.shape, 1e-5)
    torch.testing.assert_close(found, F.rms_norm(hidden, weight.shape, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_attention_without_torchs_slow_kernel(dtype: torch.dtype, masked: bool) -> None:
    """With its fused kernels alone, attention of grouped heads is that of the CPU."""
    _, _, stage = build(tiny({"model": {"transformer_impl": "local"}}), 1)
    decoder: Any = stage.chunks[0].decoder
    attention = decoder.layers[0].self_attention.core_attention
    assert isinstance(attention, CausalAttention)
    query, key, value = (torch.randn(128, 2, heads, 16, dtype=dtype) for heads in (4, 2, 2))
    mask = document_mask(torch.arange(128).div(50, rounding_mode="floor").expand(2, -1)) if masked else None
    expected = attention(query.float(), key.float(), value.float(), mask)
    kernels = [
        torch.nn.attention.SDPBackend.FLASH_ATTENTION,
        torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION,
    ]
    with torch.nn.attention.sdpa_kernel(kernels):
        found = attention(
            *(part.cuda() for part in (query, key, value)), None if mask is None else mask.cuda()
        )
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)
