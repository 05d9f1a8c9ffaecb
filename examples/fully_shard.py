"""NoLoCo with fully_shard (FSDP2): two replicas of two ranks, each with half of the weights.

    torchrun --nproc-per-node 4 examples/fully_shard.py

Needs `pip install .`, no DeepSpeed. What NoLoCo adds to an ordinary loop is marked.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron_noloco.attach import attach
from megatron_noloco.settings import NolocoSettings

REPLICAS, STEPS = 2, 60


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # NoLoCo: a mesh for each replica. A replica that is a job of its own needs none.
    meshes = init_device_mesh(device.type, (REPLICAS, ranks // REPLICAS), mesh_dim_names=("replica", "shard"))
    mesh = meshes["shard"]

    torch.manual_seed(0)  # every rank starts from the same weights
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    noloco = attach(model, NolocoSettings(local_steps=10), replicas=REPLICAS)  # NoLoCo
    draw = torch.Generator().manual_seed(1 + rank)  # every rank has data of its own
    for step in range(STEPS):
        points = (4 * torch.rand(32, 2, generator=draw) - 2).to(device)  # a surface to learn: sin(x) y
        loss = nn.functional.mse_loss(model(points).squeeze(1), points[:, 0].sin() * points[:, 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for report in noloco.step():  # NoLoCo
            if rank == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}, spread {report.spread:.5f}")
    noloco.average()  # NoLoCo: the replicas become one model
    noloco.close()
    norm = nn.utils.get_total_norm(model.parameters())
    assert isinstance(norm, DTensor)
    print(f"rank {rank}: the weights have the norm {norm.full_tensor().item():.5f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
