"""What it costs to be here: a step, start and memory of `train` with one rank, beside a loop around Megatron-core.

    python -m tools.peers.here bare

is the bare loop: torch, Megatron-core's GPTModel of the same sizes, AdamW, one step.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools import throughput_models
from tools.netlab.lab import REPOSITORY

SIZES = ("tiny", "small")
SIZE = throughput_models.SIZES["tiny"]


def start_up(folder: Path) -> dict[str, Any]:
    """Return processor seconds and the largest resident memory of one step, by the bare loop and by `train`,
    which then saves.
    """
    folder.mkdir(parents=True)
    more = {
        "data": {"text": "python-stdlib"},
        "training": {"train_iters": 1, "output_dir": str(folder.resolve())},
        "evaluation": {"iters": 0},
        "tensorboard": {"enabled": False},
    }
    (folder / "config.json").write_text(json.dumps(throughput_models.config_of(SIZE, "fp32", "local") | more))
    ours = ["-m", "megatron_noloco", "train", str(folder / "config.json"), "--progress", "lines"]
    return {
        "train": _run([sys.executable, *ours]),
        "bare loop": _run([sys.executable, "-m", "tools.peers.here", "bare"]),
    }


def step(size: str) -> dict[str, Any]:
    """Return tokens per second of a local step without rounds, over those of the bare loop."""
    command = [sys.executable, "-m", "tools.bench_throughput", "--size", size, "--peers", "core"]
    found = json.loads(subprocess.check_output(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL))
    return {"ours over the bare loop": found["core"]["ours_over_it"]}


def _run(command: list[str]) -> dict[str, float]:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    os.chdir(REPOSITORY)
    _, status, used = os.wait4(os.posix_spawn(command[0], command, environ, file_actions=silent), 0)
    if status:
        raise RuntimeError(f"failed: {' '.join(command)}")
    return {"processor seconds": used.ru_utime + used.ru_stime, "resident MB": used.ru_maxrss / 1024}


def bare() -> None:
    """Take one step."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer import TransformerConfig

    from megatron_noloco.pipeline import cpu

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    parallel_state.destroy_global_memory_buffer()  # that of a GPU
    cpu.prepare()
    get_cuda_rng_tracker().states_ = {"model-parallel-rng": torch.get_rng_state()}
    config = TransformerConfig(
        num_layers=SIZE.layers,
        hidden_size=SIZE.hidden,
        ffn_hidden_size=SIZE.ffn,
        num_attention_heads=SIZE.heads,
        use_cpu_initialization=True,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), SIZE.vocabulary, SIZE.seq_length)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(SIZE.vocabulary, (SIZE.micro_batch, SIZE.seq_length))
    places = torch.arange(SIZE.seq_length).expand_as(tokens)
    mask = torch.ones(SIZE.seq_length, SIZE.seq_length).triu(1).bool()[None, None]
    model(tokens, places, mask, labels=tokens).mean().backward()
    optimizer.step()
    os._exit(0)


if __name__ == "__main__":
    bare()
