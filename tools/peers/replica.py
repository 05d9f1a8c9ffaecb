"""One replica of a comparison: a small language model in plain torch, under torchft or under this project.

    python -m tools.peers.replica WAY --replica 0 --addresses HOST:PORT HOST:PORT --output FOLDER

Model, data, inner optimizer and loop are the same in all ways; what differs is the few lines of each way:

    torchft   torchft's DiLoCo over gloo; the first address is its lighthouse's
    diloco    this project's DiLoCo over gloo, all replicas one job; the first address is torch.distributed's
    groups    the same with NoLoCo
    noloco    this project's NoLoCo, each replica a job of its own

There is an address for each replica. `--work` is a JSON object of fields of `Work`. Appends a JSON line to
FOLDER/replica_I.jsonl when it starts, after each round and at its end.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tools.options import command_line

WAYS = ("torchft", "diloco", "groups", "noloco")
OUTER_LR, LAYERS = 0.7, 2
Said = dict[str, Any] | None  # of a round that has ended; None: there is none
Step = Callable[[], Said]  # called after each local step


@dataclass(frozen=True)
class Work:
    """The settings of a comparison, the same for all replicas."""

    steps: int = 100  # local steps that count
    local_steps: int = 5
    outer_momentum: float = 0.9
    nesterov: bool = True
    group_size: int = 2
    payload: Literal["fp32", "int8", "int4"] = "fp32"
    overlap_steps: int = 0
    deadline_seconds: float = 10.0
    pause: float = 0.0  # seconds to sleep in each local step
    hidden: int = 32
    length: int = 64
    batch: int = 8


class Model(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, hidden: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, hidden), nn.Embedding(length, hidden)
        layer = nn.TransformerEncoderLayer(
            hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(hidden, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of shape [batch, length, 256] for bytes of shape [batch, length]."""
        hidden = self.tokens(text) + self.places(torch.arange(text.shape[1]))
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
    options: argparse.Namespace, work: Work, model: Model, optimizer: torch.optim.Optimizer
) -> Iterator[Step]:
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    host = options.addresses[options.replica].partition(":")[0]
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    deadline = timedelta(seconds=work.deadline_seconds)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=deadline),
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["optimizer"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,  # all replicas start from the same weights
        timeout=deadline,
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname=host,
        lighthouse_addr=f"http://{options.addresses[0]}",
        replica_id=f"replica_{options.replica}",
    )
    outer = torch.optim.SGD(
        model.parameters(), lr=OUTER_LR, momentum=work.outer_momentum, nesterov=work.nesterov
    )
    steps, committed = 0, manager.current_step()

    def step() -> Said:
        nonlocal steps, committed
        steps += 1
        if steps % work.local_steps:
            return None
        before, committed = committed, manager.current_step()
        return {"counts": committed > before, "done": committed * work.local_steps}

    with DiLoCo(manager, [model], optimizer, outer, work.local_steps):
        yield step
    manager.shutdown(wait=False)


@contextmanager
def under_this(
    options: argparse.Namespace, work: Work, model: Model, optimizer: torch.optim.Optimizer
) -> Iterator[Step]:
    from megatron_noloco.attach import attach
    from megatron_noloco.settings import FederationSettings, NolocoSettings

    settings = NolocoSettings(
        method="diloco" if options.way == "diloco" else "noloco",
        local_steps=work.local_steps,
        group_size=work.group_size,
        payload=work.payload,
        deadline_seconds=work.deadline_seconds,
        overlap_steps=work.overlap_steps,
        outer_momentum=work.outer_momentum,
        outer_lr=OUTER_LR,
        outer_nesterov=work.nesterov,
    )
    addresses, replica = options.addresses, options.replica
    if options.way == "noloco":
        federation = FederationSettings(
            rendezvous="tcp://" + ",".join(addresses),
            listen=f"tcp://{addresses[replica]}",
            key_file=str(options.output / "key"),
            skip_local_steps=False,
            start_with=len(addresses),
        )
        noloco = attach(model, settings, federation=federation, slot=replica, inner=optimizer)
    else:
        dist.init_process_group(
            "gloo", init_method=f"tcp://{addresses[0]}", rank=replica, world_size=len(addresses)
        )
        noloco = attach(model, settings, replicas=len(addresses))

    def step() -> Said:
        reports = noloco.step()
        if not reports:
            return None
        exchange = reports[-1].exchange
        return {
            "done": noloco.done,
            "counts": not exchange.missed,
            "exchange_seconds": exchange.seconds,
            "pause_seconds": reports[-1].pause_seconds,
        }

    yield step
    if dist.is_initialized():
        dist.barrier()
    noloco.close()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--addresses", nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=json.loads, default={})
    options = parser.parse_args()
    work = Work(**options.work)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every replica starts from the same weights
    model = Model(work.hidden, work.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    text = python_text()
    held_out = batch_of(text[-100_000:], 0, 64, work.length)
    text = text[:-100_000]
    under = under_torchft if options.way == "torchft" else under_this

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    with (options.output / f"replica_{options.replica}.jsonl").open("a", buffering=1) as log:

        def say(event: str, **more: Any) -> None:
            log.write(json.dumps({"event": event, "time": time.time(), **more}) + "\n")

        say("process", weights=sum(weight.numel() for weight in model.parameters()))
        with under(options, work, model, optimizer) as step:
            say("start")
            done = drawn = 0
            while done < work.steps:
                drawn += 1
                seed = drawn * len(options.addresses) + options.replica
                optimizer.zero_grad()
                loss_of(batch_of(text, seed, work.batch, work.length)).backward()
                time.sleep(work.pause)
                began = time.perf_counter()
                optimizer.step()  # torchft's rounds are in it
                ended = step()
                seconds = time.perf_counter() - began
                if ended:
                    done = ended["done"]
                    with torch.no_grad():
                        say("round", seconds=seconds, loss=loss_of(held_out).item(), **ended)
            say("end")


if __name__ == "__main__":
    main()
