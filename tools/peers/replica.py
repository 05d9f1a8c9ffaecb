"""One replica of a comparison: a small language model in plain torch, under torchft or under this project.

    python -m tools.peers.replica WAY --replica 0 --replicas 4 --address HOST:PORT --output FOLDER

Model, data, inner optimizer and loop are the same in all ways; what differs is the few lines of each way:

    torchft-diloco     torchft's DiLoCo over gloo; the address is its lighthouse's
    torchft-localsgd   its LocalSGD: the mean of the weights, in the same place
    diloco             this project's DiLoCo over gloo, all replicas one job; the address is torch.distributed's
    localsgd           the same with plain averages
    groups             the same with NoLoCo
    noloco             this project's NoLoCo, each replica a job of its own; the addresses of all replicas

Appends a JSON line to FOLDER/replica_I.jsonl when it starts, after each round and at its end, and leaves its
weights in FOLDER/replica_I.pt.
"""

import argparse
import json
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tools.processes import allocated_bytes

if TYPE_CHECKING:
    from megatron_noloco.outer import RoundReport
    from megatron_noloco.settings import NolocoSettings

Step = Callable[
    [], dict[str, Any] | None
]  # called after each local step; what to say of a round that has ended


class Model(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, hidden: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, hidden), nn.Embedding(length, hidden)
        layer = nn.TransformerEncoderLayer(
            hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(hidden, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of shape [batch, length, 256] for bytes of shape [batch, length]."""
        places = torch.arange(text.shape[1])
        hidden = self.tokens(text) + self.places(places)
        return self.out(self.layers(hidden, mask=self.mask, is_causal=True))


def python_text() -> Tensor:
    """Return the sources of Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    ).long()


def batch_of(text: Tensor, seed: int, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return `size` random windows of the text, and the same one byte later."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length - 1, (size, 1), generator=draw)
    windows = text[starts + torch.arange(length + 1)]
    return windows[:, :-1], windows[:, 1:]


@contextmanager
def under_torchft(
    options: argparse.Namespace, model: Model, optimizer: torch.optim.Optimizer
) -> Iterator[Step]:
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    host = os.uname().nodename if options.hosts else "127.0.0.1"
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=options.deadline)),
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["optimizer"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,  # all replicas start from the same weights
        timeout=timedelta(seconds=options.deadline),
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname=host,
        lighthouse_addr=f"http://{options.address}",
        replica_id=f"replica_{options.replica}",
    )
    if options.way == "torchft-diloco":
        outer = torch.optim.SGD(
            model.parameters(),
            lr=options.outer_lr,
            momentum=options.outer_momentum,
            nesterov=options.nesterov,
        )
        method: Any = DiLoCo(manager, [model], optimizer, outer, options.local_steps)
    else:
        method = LocalSGD(manager, model, optimizer, options.local_steps)
    steps, committed = 0, manager.current_step()

    def step() -> dict[str, Any] | None:
        nonlocal steps, committed
        steps += 1
        if steps % options.local_steps:
            return None
        before, committed = committed, manager.current_step()
        counts = {"counts": committed > before, "replicas": manager.num_participants()}
        return counts | {"done": committed * options.local_steps}

    with method:
        yield step
    manager.shutdown(wait=False)


def settings_of(options: argparse.Namespace) -> "NolocoSettings":
    from megatron_noloco.settings import NolocoSettings

    of_all = options.way in ("diloco", "localsgd")
    outer: dict[str, Any] = {"outer_momentum": options.outer_momentum, "outer_lr": options.outer_lr}
    if options.way == "localsgd":
        outer = {"outer_momentum": 0, "outer_lr": 1}
    if options.nesterov:
        outer["outer_nesterov"] = True
    return NolocoSettings(
        method="diloco" if of_all else "noloco",
        local_steps=options.local_steps,
        group_size=options.group_size,
        payload=options.payload,
        deadline_seconds=options.deadline,
        overlap_steps=options.overlap,
        **outer,
    )


def said_of(report: "RoundReport", done: int) -> dict[str, Any]:
    exchange = report.exchange
    return {
        "done": done,
        "counts": not exchange.missed,
        "replicas": len(exchange.group),
        "exchange_seconds": exchange.seconds,
        "pause_seconds": report.pause_seconds,
    }


@contextmanager
def in_one_job(options: argparse.Namespace, model: Model, _: torch.optim.Optimizer) -> Iterator[Step]:
    from megatron_noloco.outer import OuterOptimizer, TorchWeights
    from megatron_noloco.plans.topology import Place
    from megatron_noloco.transport.torch_dist import TorchTransport

    dist.init_process_group(
        "gloo", init_method=f"tcp://{options.address}", rank=options.replica, world_size=options.replicas
    )
    settings = settings_of(options)
    place = Place(options.replica, options.replicas)
    outer = OuterOptimizer(TorchWeights(model.parameters()), TorchTransport(), place, settings)
    steps = 0

    def step() -> dict[str, Any] | None:
        nonlocal steps
        steps += 1
        reports = outer.after_local_step(steps)
        return said_of(reports[-1], steps) if reports else None

    yield step
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def as_a_job(options: argparse.Namespace, model: Model, optimizer: torch.optim.Optimizer) -> Iterator[Step]:
    from megatron_noloco.attach import attach
    from megatron_noloco.settings import FederationSettings

    addresses = options.address.split(",")
    noloco = attach(
        model,
        settings_of(options),
        federation=FederationSettings(
            rendezvous="tcp://" + ",".join(addresses),
            listen=f"tcp://{addresses[options.replica]}",
            encryption="none",  # torchft's messages are not encrypted either
            skip_local_steps=False,
            start_with=options.replicas,
        ),
        slot=options.replica,
        inner=optimizer,
    )

    def step() -> dict[str, Any] | None:
        reports = noloco.step()
        return said_of(reports[-1], noloco.done) if reports else None

    yield step
    noloco.close()


WAYS = {
    "torchft-diloco": under_torchft,
    "torchft-localsgd": under_torchft,
    "diloco": in_one_job,
    "localsgd": in_one_job,
    "groups": in_one_job,
    "noloco": as_a_job,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument(
        "--address", required=True, help="HOST:PORT; for noloco one for each replica, with commas"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100, help="local steps that count")
    parser.add_argument("--local-steps", type=int, default=5, help="to a round")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--nesterov", action="store_true")
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--payload", default="fp32")
    parser.add_argument("--overlap", type=int, default=0, help="local steps of delay")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in each local step")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hosts", action="store_true", help="whether each replica is on a host of its own")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = allocated_bytes()
    torch.manual_seed(0)  # every replica starts from the same weights
    model = Model(options.hidden, options.layers, options.length)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1
    )
    text = python_text()
    held_out = batch_of(text[-100_000:], 0, 64, options.length)
    text = text[:-100_000]

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    with (options.output / f"replica_{options.replica}.jsonl").open("a", buffering=1) as log:

        def say(event: str, **more: Any) -> None:
            log.write(json.dumps({"event": event, "time": time.time(), **more}) + "\n")

        say("process", weights=sum(weight.numel() for weight in model.parameters()))
        with WAYS[options.way](options, model, optimizer) as step:
            say("start")
            done, drawn, held = 0, 0, 0
            while done < options.steps:
                drawn += 1
                batch = batch_of(
                    text, drawn * options.replicas + options.replica, options.batch, options.length
                )
                optimizer.zero_grad()
                loss_of(batch).backward()
                held = allocated_bytes() - before
                time.sleep(options.pause)
                began = time.perf_counter()
                optimizer.step()  # torchft's rounds are in it
                ended = step()
                seconds = time.perf_counter() - began
                if ended:
                    done = ended["done"]
                    with torch.no_grad():
                        say("round", seconds=seconds, drawn=drawn, loss=loss_of(held_out).item(), **ended)
            torch.save(model.state_dict(), options.output / f"replica_{options.replica}.pt")
            say("end", allocated_bytes=held)


if __name__ == "__main__":
    main()
