"""NoLoCo with torchtitan: a loop around its Llama with its FSDP2, as one replica of several.

    megatron-noloco keys my-run.key
    python examples/torchtitan_loop.py --slot 0 --slots 2 --folder my-run &
    python examples/torchtitan_loop.py --slot 1 --slots 2 --folder my-run

torchrun --nproc-per-node 2 in place of python: two ranks for each replica. torchtitan's own trainer needs GPUs.
This loop calls `apply_fsdp_to_decoder`, as torchtitan's `parallelize_llama` does. `--slots 1` trains alone.

Needs `pip install '.[federation]' torchtitan spmd_types triton`. The lines that NoLoCo adds are marked.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, llama3_configs

from megatron_noloco.attach import attach
from megatron_noloco.settings import FederationSettings, NolocoSettings

LENGTH, SAVE_INTERVAL = 32, 20


def samples() -> Tensor:
    """Return the bytes of some of Python's source files, shape [samples, LENGTH + 1]."""
    library = Path(argparse.__file__).parent
    text = b"".join((library / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py"))
    return torch.tensor(list(text)).unfold(0, LENGTH + 1, LENGTH)


def small_llama() -> Llama3Model:
    """Return torchtitan's debug model with a single layer, and attention that runs on a CPU."""
    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:1]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model: Llama3Model = config.build()
    model.init_states()
    return model


def loss_of(model: Llama3Model, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slot", type=int, required=True, help="which replica this job is, from 0")
    parser.add_argument("--slots", type=int, required=True, help="how many replicas there are")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints and the model")
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every replica starts from the same weights
    model = small_llama()
    apply_fsdp_to_decoder(
        model, init_device_mesh("cpu", (ranks,)), torch.float32, torch.float32, pp_enabled=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    folder = options.folder / f"replica_{options.slot}"
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, saved = folder / f"rank_{rank}.pt", {}
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    print(f"begins; checkpoint: {checkpoint if saved else None}", flush=True)

    where: dict[str, Any] = {"replicas": 1}  # alone
    if options.slots > 1:
        federation = FederationSettings(
            rendezvous=f"file://{options.folder}/rendezvous",
            key_file=f"{options.folder}.key",  # a copy on each machine
            skip_local_steps=False,  # a slow job lets its partners wait
            start_with=options.slots,  # wait for all at the beginning
            rounds_behind=1,  # a job that comes back goes on where the others are
        )
        where = {"federation": federation, "slot": options.slot}
    settings = NolocoSettings(local_steps=10, deadline_seconds=120)
    noloco = attach(model, settings, inner=optimizer, state=saved.get("noloco"), **where)  # NoLoCo: last
    text = samples()
    held_out, data = text[::10], text[torch.arange(len(text)) % 10 > 0][options.slot :: options.slots]
    while noloco.done < options.steps:  # NoLoCo: `done` also counts the steps that this job was away for
        draw = torch.Generator().manual_seed(noloco.done * ranks + rank)
        loss = loss_of(model, data[torch.randint(len(data), (4,), generator=draw)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for report in noloco.step():  # NoLoCo: a round after every 10 steps
            partner = [slot for slot in report.exchange.group if slot != options.slot] or [-1]
            print(f"step {noloco.done}: loss {loss.item():.4f}, partner {partner[0]}", flush=True)
        if noloco.done % SAVE_INTERVAL == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"noloco": noloco.state_dict()}, checkpoint.with_suffix(".part"))  # NoLoCo
            checkpoint.with_suffix(".part").replace(checkpoint)
    noloco.average()  # NoLoCo: the replicas that are there become one model
    noloco.close()
    with torch.no_grad():
        print(f"finished; loss on held-out text {loss_of(model, held_out).item():.4f}", flush=True)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, folder / "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
