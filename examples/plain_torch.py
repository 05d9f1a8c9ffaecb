"""NoLoCo in a training loop of your own: four processes, plain torch, neither DeepSpeed nor Megatron.

    python examples/plain_torch.py                               # starts its four processes itself
    torchrun --nproc-per-node 4 examples/plain_torch.py          # the launcher starts them

Needs `pip install .` without any extra. `train` calls `outer`: NoLoCo adds nothing else to a loop.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from megatron_noloco.outer import OuterOptimizer, TorchWeights
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import NolocoSettings
from megatron_noloco.transport.torch_dist import TorchTransport

REPLICAS, STEPS, SEED = 4, 200, 0
SETTINGS = NolocoSettings(local_steps=10)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)  # every replica starts from the same weights
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, draw: torch.Generator) -> float:
    points = 4 * torch.rand(64, 2, generator=draw) - 2  # a surface to learn: sin(x) y
    loss = nn.functional.mse_loss(model(points).squeeze(1), points[:, 0].sin() * points[:, 1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(replica: int, replicas: int) -> Tensor:
    """Train one replica; return its weights. Needs torch.distributed initialised, with gloo."""
    model, optimizer = build()
    weights = TorchWeights(model.parameters())
    outer = OuterOptimizer(weights, TorchTransport(), Place(replica, replicas), SETTINGS, SEED)
    draw = torch.Generator().manual_seed(1 + replica)  # every replica has data of its own
    for step in range(STEPS):
        loss = local_step(model, optimizer, draw)
        for report in outer.after_local_step(step + 1):
            partners = [member for member in report.exchange.group if member != replica]
            if replica == 0:
                print(f"step {step + 1}: loss {loss:.4f}, partner {partners}, spread {report.spread:.5f}")
    return weights.read()


def start(replica: int, replicas: int, init_method: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=replica, world_size=replicas)
    train(replica, replicas)
    dist.barrier()  # a partner may still need this process
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(start, args=(REPLICAS, f"file://{folder}/store"), nprocs=REPLICAS)
