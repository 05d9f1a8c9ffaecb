"""The models of measurements, and their training settings."""

from dataclasses import dataclass
from typing import Any

LR, BETAS, WEIGHT_DECAY, CLIPPING = 1e-4, [0.9, 0.95], 0.1, 1.0


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    seq_length: int
    vocabulary: int
    micro_batch: int
    microbatches: int


SIZES = {
    "tiny": Size(2, 64, 128, 4, 64, 512, 2, 2),
    "125M": Size(12, 768, 2048, 12, 1024, 32000, 16, 4),
    "350M": Size(24, 1024, 2816, 16, 1024, 32000, 16, 4),
    "1.3B": Size(24, 2048, 5504, 16, 2048, 32000, 2, 16),
}


def config_of(size: Size, precision: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": size.micro_batch,
        "gradient_accumulation_steps": size.microbatches,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": BETAS, "weight_decay": WEIGHT_DECAY}},
        "gradient_clipping": CLIPPING,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        "noloco": {"enabled": False},
        "parallel": {"replicas": 1},
        "model": {
            "num_layers": size.layers,
            "hidden_size": size.hidden,
            "ffn_hidden_size": size.ffn,
            "num_attention_heads": size.heads,
            "seq_length": size.seq_length,
        },
        "data": {"text": "none"},
        "training": {"train_iters": 1},
    }
