"""nanoGPT's recipe for a CPU: characters of tinyshakespeare, 2,000 steps; 1.88 by its README.

The same model and settings in plain torch; in plain torch with 4 replicas by `attach`, at equal tokens; and with
`train`, whose model is a Llama with as many weights.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_noloco.attach import attach
from megatron_noloco.settings import NolocoSettings

PUBLISHED = 1.88
LAYERS, HEADS, HIDDEN, LENGTH, BATCH = 4, 4, 128, 64, 12
LR, LEAST_LR, WARM_UP, BETAS, WEIGHT_DECAY, CLIPPING = 1e-3, 1e-4, 100, (0.9, 0.99), 0.1, 1.0
EVALUATED = 140  # batches: all that the text has for validation; nanoGPT takes 20
RATES = (1e-3, 2e-3, 4e-3)  # the published one, and above
ROUNDS = NolocoSettings(local_steps=1)


class Block(nn.Module):
    """A layer of GPT-2 without biases and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN, bias=False) for _ in range(2)])
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = (
            nn.Linear(HIDDEN, 4 * HIDDEN, bias=False),
            nn.Linear(4 * HIDDEN, HIDDEN, bias=False),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the shape of the argument, [batch, length, HIDDEN]."""
        heads = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))


class GPT(nn.Module):
    """GPT-2 with learned positions and tied embeddings."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                last = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS) if last else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of shape [batch, length, vocabulary]."""
        hidden = self.blocks(self.tokens(text) + self.places.weight[: text.shape[1]])
        return F.linear(self.norm(hidden), self.tokens.weight)


@dataclass(frozen=True)
class Text:
    """Characters as numbers; the last tenth is for validation."""

    train: Tensor
    valid: Tensor
    vocabulary: int

    @classmethod
    def read(cls, file: Path) -> "Text":
        """Return the text of a file."""
        text = file.read_text()
        numbers = {character: number for number, character in enumerate(sorted(set(text)))}
        data = torch.tensor([numbers[character] for character in text])
        cut = int(0.9 * len(data))
        return cls(data[:cut], data[cut:], len(numbers))


def batch_of(data: Tensor, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random windows, and the same one character later."""
    starts = torch.randint(len(data) - LENGTH, (size, 1), generator=draw)
    windows = data[starts + torch.arange(LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:]


def train(file: Path, steps: int, seed: int, lr: float, replica: int = 0, replicas: int = 1) -> float:
    """Train one replica, whose batch is a part of BATCH; returns the validation loss, in nats per character."""
    text = Text.read(file)
    torch.manual_seed(seed)
    model = GPT(text.vocabulary)
    decays = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": decays, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS)
    draw = torch.Generator().manual_seed(1000 * seed + replica)
    noloco = attach(model, ROUNDS, replicas=replicas) if replicas > 1 else None

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    for step in range(steps):
        share = (step - WARM_UP) / max(1, steps - WARM_UP)
        cosine = LEAST_LR / LR + (1 - LEAST_LR / LR) * (1 + math.cos(math.pi * share)) / 2
        for group in optimizer.param_groups:
            group["lr"] = lr * (cosine if step >= WARM_UP else (step + 1) / (WARM_UP + 1))
        optimizer.zero_grad()
        loss_of(batch_of(text.train, BATCH // replicas, draw)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        if noloco:
            noloco.step()
    if noloco:
        noloco.average()
        noloco.close()
    with torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        losses = [loss_of(batch_of(text.valid, BATCH, draw)).item() for _ in range(EVALUATED)]
    return sum(losses) / len(losses)


def replica(rank: int, replicas: int, folder: str, arguments: tuple[Path, int, int, float]) -> None:
    """Train as one process of several; the first leaves the loss in a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", replicas)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=replicas)
    loss = train(*arguments, replica=rank, replicas=replicas)
    if rank == 0:
        (Path(folder) / "loss").write_text(str(loss))
    dist.barrier()
    dist.destroy_process_group()


def plain(file: Path, steps: int, seed: int, lr: float = LR) -> float:
    """Return the validation loss of plain torch."""
    return train(file, steps, seed, lr)


def attached(file: Path, steps: int, seed: int, folder: Path, lr: float = LR, replicas: int = 4) -> float:
    """Return the validation loss of the mean of replicas whose batches together are nanoGPT's."""
    folder.mkdir(parents=True)
    arguments = (replicas, str(folder), (file, steps, seed, lr))
    mp.start_processes(replica, arguments, nprocs=replicas, start_method="spawn")
    return float((folder / "loss").read_text())


def trained(file: Path, steps: int, seed: int, folder: Path) -> float:
    """Return the validation loss of a Llama of as many weights, by `train`."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": BETAS, "weight_decay": WEIGHT_DECAY}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": steps,
                "warmup_num_steps": WARM_UP,
                "warmup_type": "linear",
                "warmup_min_ratio": 0.0,
                "cos_min_ratio": LEAST_LR / LR,
            },
        },
        "gradient_clipping": CLIPPING,
        "noloco": {"enabled": False},
        "parallel": {"replicas": 1},
        "model": {
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 344,  # three matrices in place of two of 4 x 128
            "num_attention_heads": HEADS,
            "seq_length": LENGTH,
            "untie_embeddings_and_output_weights": False,
        },
        "data": {"text": str(file.resolve()), "split": "90,10,0"},
        "evaluation": {"iters": EVALUATED},
        "training": {"train_iters": steps, "seed": seed, "output_dir": str(folder.resolve())},
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "megatron_noloco", "train", str(folder / "config.json")]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in next(folder.rglob("metrics.jsonl")).read_text().splitlines()]
    return float(next(row["validation/loss"] for row in reversed(rows) if "validation/loss" in row))
