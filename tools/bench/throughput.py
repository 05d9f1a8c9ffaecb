"""Tokens per second and MFU of a local step, beside the same work in plain torch loops.

    python -m tools.bench throughput --size 1.3B        # on a GPU; the default there: 125M, bf16
    python -m tools.bench throughput --size tiny        # on a CPU, in fp32

One process, one replica of one rank. `ours` is the local step of `train`: Megatron-core's schedule, DeepSpeed's
optimizer, and the recording of its numbers. The peers take the same microbatches of random tokens through

- `core`: the same Megatron-core model, called by a loop of a few lines;
- `transformers`: Hugging Face's Llama of the same sizes with torch's attention, on a GPU compiled.

Both have fp32 master weights, gradients clipped by their norm, and torch's AdamW (fused on a GPU). Steps of ours
and of a peer alternate. Seconds are medians, on a CPU those of the process itself, so that other work counts
little; a ratio is ours / peer in tokens per second, the median over the repeats.
"""

import argparse
import gc
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("LOCAL_RANK", "0")  # before deepspeed is imported, which asks for them
os.environ["TORCHDYNAMO_DISABLE"] = "0"  # the model of transformers is compiled

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_noloco.job.start_up import before_engines
from tools.models import BETAS, CLIPPING, LR, SIZES, WEIGHT_DECAY, config_of

before_engines()  # before Megatron-core and deepspeed are imported

from megatron_noloco.config import RunConfig
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.model.families import table_of, training_flops
from megatron_noloco.model.stage import DTYPES, Stage, build_stage
from megatron_noloco.monitor.metrics import Metrics
from megatron_noloco.outer.vectors import wait_for
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import Groups, build_groups
from megatron_noloco.plans.routing import Routing
from megatron_noloco.preflight.accelerators import peak_tflops_here
from tools.bench.laps import Laps

Step = Callable[[], None]


def add_options(parser: argparse.ArgumentParser) -> None:
    gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=SIZES, default="125M" if gpu else "tiny")
    parser.add_argument("--precision", choices=DTYPES, default="bf16" if gpu else "fp32")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--warm-ups", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=0, world_size=1)
        try:
            return Bench(options).measure()
        finally:
            dist.destroy_process_group()


class Bench:
    """Builds ours and the peers, and times them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.size = SIZES[options.size]
        cpu.prepare()
        self.config = RunConfig(**config_of(self.size, options.precision))
        self.architecture = self.config.architecture(self.size.vocabulary)
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.dtype = DTYPES[self.config.precision]
        tokens = torch.randint(self.size.vocabulary, (self.size.micro_batch, self.size.seq_length + 1))
        self.tokens, self.labels = (part.contiguous() for part in (tokens[:, :-1], tokens[:, 1:]))
        if torch.cuda.is_available():
            self.tokens, self.labels = self.tokens.pin_memory(), self.labels.pin_memory()

    def measure(self) -> dict[str, Any]:
        tokens = self.size.micro_batch * self.size.seq_length * self.size.microbatches
        flops = training_flops(self.architecture) * tokens / self.size.seq_length
        peak = peak_tflops_here(self.config.precision)
        ours = self.ours()
        found: dict[str, Any] = {
            "size": self.options.size,
            "precision": self.options.precision,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU, 1 thread",
            "tokens_per_step": tokens,
        }

        def figures(seconds: list[float]) -> dict[str, float | None]:
            median = statistics.median(seconds)
            tflops = flops / median / 1e12
            return {
                "tokens_per_second": round(tokens / median, 1),
                "tflops": round(tflops, 4),
                "mfu": round(tflops / peak, 4) if peak else None,
            }

        for name in self.options.peers:
            peer = PEERS[name](self)
            ours_seconds, seconds = self.alternate(ours, peer)
            ratios = [theirs / our for our, theirs in zip(ours_seconds, seconds, strict=True)]
            found[name] = figures(seconds) | {"ours_over_it": round(statistics.median(ratios), 4)}
            found.setdefault("ours", figures(ours_seconds))  # beside the first peer
            del peer  # and free its memory
            gc.collect()
            torch.compiler.reset()
            torch.cuda.empty_cache()  # does nothing without a GPU
        return found | {
            "figure": f"{found['ours']['tokens_per_second']} tokens/s, MFU {found['ours']['mfu']}",
            "peer": ", ".join(f"{found[name]['ours_over_it']} of {name}" for name in self.options.peers),
        }

    def ours(self) -> Step:
        groups, stage = self.core_model()
        metrics = Metrics(0, groups.replica)
        engine = ReplicaEngine(stage, groups, self.config.as_deepspeed(), metrics.record)
        routes = Routing(1, self.size.microbatches, 0, "off").straight()
        steps = 0

        def step() -> None:
            nonlocal steps
            engine.train_batch(lambda replica, index: (self.tokens, self.labels, None), routes)
            steps += 1
            if steps % self.config.training.log_interval == 0:
                metrics.write_steps(steps, self.config.training.log_interval)

        return step

    def core(self) -> Step:
        _, stage = self.core_model()
        model = stage.chunks[0].to(self.device)
        return self.bare_loop(
            model, lambda tokens, labels: model(tokens, None, None, labels=labels).float().mean()
        )

    def transformers(self) -> Step:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.architecture.padded_vocab_size,
            hidden_size=self.size.hidden,
            intermediate_size=self.size.ffn,
            num_hidden_layers=self.size.layers,
            num_attention_heads=self.size.heads,
            max_position_embeddings=self.size.seq_length,
            use_cache=False,
        )
        config._attn_implementation = "sdpa"
        with self.device:
            llama: nn.Module = LlamaForCausalLM(config)
        model = llama.to(device=self.device, dtype=self.dtype)
        called = torch.compile(model) if self.device.type == "cuda" else model

        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            logits = called(input_ids=tokens).logits
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

        return self.bare_loop(model, loss)

    def core_model(self) -> tuple[Groups, Stage]:
        groups = build_groups(self.config.topology(1), routed=False, tied=self.architecture.tied_embeddings)
        table = table_of(self.architecture)

        def drawn(name: str) -> Tensor:
            """Draw weights on the device, which is fast; throughput does not depend on the numbers."""
            return torch.randn(table.find(name).shape, device=self.device) * 0.02

        compute, seed = self.config.compute, self.config.training.seed
        return groups, build_stage(self.architecture, compute, groups, seed, drawn)

    def bare_loop(self, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
        """Return a step of forward, backward, clipping and AdamW on fp32 master weights."""
        parameters: list[Tensor] = list(model.parameters())
        masters = [parameter.detach().float().clone() for parameter in parameters]
        optimizer = torch.optim.AdamW(
            masters,
            lr=LR,
            betas=(BETAS[0], BETAS[1]),
            weight_decay=WEIGHT_DECAY,
            fused=self.device.type == "cuda",
        )
        model.train()

        def step() -> None:
            for _ in range(self.size.microbatches):
                tokens, labels = (
                    part.to(self.device, non_blocking=True) for part in (self.tokens, self.labels)
                )
                (loss_of(tokens, labels) / self.size.microbatches).backward()
            for master, parameter in zip(masters, parameters, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
            nn.utils.clip_grad_norm_(masters, CLIPPING)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)

        return step

    def alternate(self, ours: Step, peer: Step) -> tuple[list[float], list[float]]:
        """Return the seconds of each step, after the warm-ups."""
        laps = Laps(self.options.repeats, self.options.warm_ups)
        for _ in laps:
            self.timed(ours, laps, "ours")
            self.timed(peer, laps, "peer")
        seconds = laps.wall if self.device.type == "cuda" else laps.cpu
        return seconds["ours"], seconds["peer"]

    def timed(self, step: Step, laps: Laps, name: str) -> None:
        """Measure a step with an empty queue before and after it; a run queues steps ahead."""
        wait_for(self.device)
        with laps.lap(name):
            step()
            wait_for(self.device)


PEERS: dict[str, Callable[[Bench], Step]] = {"core": Bench.core, "transformers": Bench.transformers}
