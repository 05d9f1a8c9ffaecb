"""NoLoCo in a loop around DeepSpeed's engine: two replicas of two data-parallel ranks, with any ZeRO stage.

    torchrun --nproc-per-node 4 examples/deepspeed_engine.py --zero-stage 3

Needs `pip install .` and deepspeed. The three lines marked NoLoCo are all that was added to an ordinary loop.
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_noloco.attach import ReplicaGroups, attach
from megatron_noloco.settings import NolocoSettings

REPLICAS, STEPS = 2, 60


class Surface(nn.Sequential):
    """Learns sin(x) y. Its forward pass returns the loss, as that of a Hugging Face model does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, points: Tensor) -> Tensor:
        wanted = points[:, 0].sin() * points[:, 1]
        return nn.functional.mse_loss(super().forward(points).squeeze(1), wanted)

    forward = loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zero-stage", type=int, default=1, choices=(0, 1, 2, 3))
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    torch.manual_seed(0)  # every replica starts from the same weights
    model = Surface()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 32,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": options.zero_stage},
        },
        mpu=ReplicaGroups(REPLICAS),  # NoLoCo: gradients are reduced inside a replica
    )
    noloco = attach(engine, NolocoSettings(local_steps=10), replicas=REPLICAS)  # NoLoCo
    draw = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has data of its own
    for step in range(STEPS):
        points = (4 * torch.rand(32, 2, generator=draw) - 2).to(engine.device)
        loss = engine(points)
        engine.backward(loss)
        engine.step()
        for report in noloco.step():  # NoLoCo
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}, spread {report.spread:.5f}")
    dist.barrier()  # a partner may still need this process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
