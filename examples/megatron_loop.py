"""NoLoCo in Megatron-LM's loop: a job that trains a small GPT with Megatron-core, as one replica of several.

    megatron-noloco keys my-run.key
    torchrun --nproc-per-node 2 --master-port 29501 examples/megatron_loop.py --slot 0 --slots 2 --folder my-run &
    torchrun --nproc-per-node 2 --master-port 29502 examples/megatron_loop.py --slot 1 --slots 2 --folder my-run

In Megatron-LM itself the two marked calls go into megatron/training/training.py: `attach` at the end of
`setup_model_and_optimizer`, when the checkpoint is loaded, and `noloco.step()` in `train_step`, after
`optimizer.step()`. Needs `pip install '.[federation]' megatron-core` and GPUs.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_noloco.attach import attach
from megatron_noloco.settings import FederationSettings, NolocoSettings

LENGTH, VOCABULARY, BATCH = 32, 64, 4


def build(tensor_parallel: int, bf16: bool) -> tuple[list[Any], Any]:
    """Make model and optimizer as `setup_model_and_optimizer` of Megatron-LM does."""
    gpt = build_gpt(tensor_parallel, bf16)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = [DistributedDataParallel(gpt.config, ddp, gpt)]
    model[0].broadcast_params()
    numbers = OptimizerConfig(
        optimizer="adam", lr=0.003, bf16=bf16, use_distributed_optimizer=True, clip_grad=1.0
    )
    return model, get_megatron_optimizer(numbers, model)


def build_gpt(tensor_parallel: int, bf16: bool) -> Any:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    model_parallel_cuda_manual_seed(1234)  # every replica starts from the same weights
    torch.manual_seed(1234)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor_parallel,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
    gpt.to(torch.cuda.current_device())
    return Float16Module(config, gpt) if bf16 else gpt


def microbatch(step: int, source: int) -> torch.Tensor:
    """Return [BATCH, LENGTH + 1] tokens that count up from random ones, different for each source and step."""
    draw = torch.Generator().manual_seed(1000 * step + source)
    tokens = torch.randint(VOCABULARY, (BATCH, 1), generator=draw) + torch.arange(LENGTH + 1)
    return (tokens % VOCABULARY).to(torch.cuda.current_device())


def train_step(model: list[Any], optimizer: Any, tokens: torch.Tensor) -> float:
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    positions = torch.arange(LENGTH, device=tokens.device).expand(BATCH, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    loss = model[0](tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
    loss.backward()
    finalize_model_grads(model)
    optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model, optimizer = build(options.tensor_parallel, options.bf16)
    noloco = attach(  # NoLoCo: last, after the checkpoint is loaded
        optimizer,
        NolocoSettings(local_steps=10, deadline_seconds=120),
        federation=FederationSettings(
            rendezvous=f"file://{options.folder}/rendezvous",
            key_file=f"{options.folder}.key",  # a copy on each machine
            skip_local_steps=False,  # a slow job lets its partners wait
            start_with=options.slots,
        ),
        slot=options.slot,
    )
    source = 100 * options.slot + parallel_state.get_data_parallel_rank()
    while noloco.done < 60:
        loss = train_step(model, optimizer, microbatch(noloco.done, source))
        for report in noloco.step():  # NoLoCo: a round after every 10 steps
            if dist.get_rank() == 0:
                outcome = (
                    report.exchange.missed or f"group {report.exchange.group}, spread {report.spread:.5f}"
                )
                print(f"step {noloco.done}: loss {loss:.4f}, {outcome}", flush=True)
    noloco.average()  # NoLoCo: the replicas that are there become one model
    noloco.close()
    norm = sum(parameter.detach().float().square().sum().item() for parameter in model[0].parameters()) ** 0.5
    print(f"rank {dist.get_rank()}: finished; its weights have the norm {norm:.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
