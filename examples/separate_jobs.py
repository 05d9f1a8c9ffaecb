"""Replicas as separate jobs: an ordinary job in plain torch, which is one replica of two.

    megatron-noloco keys my-run.key
    python examples/separate_jobs.py --slot 0 --folder my-run &
    python examples/separate_jobs.py --slot 1 --folder my-run

Each may be started, stopped and started again on its own, on any machine that can write the folder; it continues
from its checkpoint. Several ranks for each replica: torchrun --nproc-per-node 2 in place of python, for both jobs.

Needs `pip install '.[federation]'`. What NoLoCo adds to the loop is marked.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_noloco.attach import attach
from megatron_noloco.settings import FederationSettings, NolocoSettings

SLOTS, SAVE_INTERVAL = 2, 50


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = 0
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        rank = dist.get_rank()

    torch.manual_seed(0)  # every replica starts from the same weights
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoint = options.folder / f"replica_{options.slot}_rank_{rank}.pt"
    saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else {}
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    noloco = attach(  # NoLoCo: last, after the checkpoint is loaded
        parallel,
        NolocoSettings(local_steps=10, deadline_seconds=60),
        federation=FederationSettings(
            rendezvous=f"file://{options.folder}/rendezvous",
            key_file=f"{options.folder}.key",  # a copy on each machine
            skip_local_steps=False,  # a slow job lets its partners wait
            start_with=SLOTS,  # waits for a minute at most, see deadline_seconds
        ),
        slot=options.slot,
        state=saved.get("noloco"),
        inner=optimizer,  # a job that begins late, or has lost its checkpoint, takes over the state of another
    )
    # NoLoCo: `done` also counts the steps that this job was away for.
    while noloco.done < options.steps:
        draw = torch.Generator().manual_seed((noloco.done * SLOTS + options.slot) * 1000 + rank)
        points = 4 * torch.rand(64, 2, generator=draw) - 2  # data of its own; a surface to learn: sin(x) y
        loss = nn.functional.mse_loss(parallel(points).squeeze(1), points[:, 0].sin() * points[:, 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for report in noloco.step():  # NoLoCo: a round after every 10 steps
            outcome = report.exchange.missed or f"group {report.exchange.group}, spread {report.spread:.5f}"
            if rank == 0:
                print(f"step {noloco.done}: loss {loss.item():.4f}, {outcome}", flush=True)
        if noloco.done % SAVE_INTERVAL == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"noloco": noloco.state_dict()}, checkpoint)  # NoLoCo
    noloco.average()  # NoLoCo: the replicas that are there become one model
    noloco.close()
    weights = nn.utils.parameters_to_vector(model.parameters())
    if rank == 0:
        print(f"finished; the weights have the norm {weights.norm().item():.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
