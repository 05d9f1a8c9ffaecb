"""Runs of `train` with several replicas of one rank, which share one GPU; a step of the check for each.

    python -m tools.gpu_check.replicas quickstart | memory | rounds | overlap [--replicas 4] [--size 125M]

quickstart: the quickstart's run without pipeline stages, on the GPU and on the CPU; fails where losses differ.
memory: the most that torch takes in two local steps of one replica, and what `plan` says.
rounds: seconds of a local step with a round every 50, and without rounds.
overlap: seconds for which a round stops the local steps, with one step's delay and without.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

from megatron_noloco.config import RunConfig
from megatron_noloco.monitor.numbers import Row
from megatron_noloco.monitor.run_log import ReplicaLog
from megatron_noloco.preflight.short_run import dry_run
from tools.models import SIZES, config_of
from tools.options import command_line
from tools.runner import REPOSITORY, launched

_DIFFER = 0.02  # nats per token, at most: rounding grows, and Muon computes in bf16 on a GPU
LOCAL_STEPS = 50


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=WAYS)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--size", choices=SIZES, default="125M")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--local-steps", type=int, default=LOCAL_STEPS)
    parser.add_argument("--steps", type=int, default=3 * LOCAL_STEPS)
    options = parser.parse_args()
    found = WAYS[options.what](options)
    print(json.dumps(found))
    sys.exit(found.get("problem") or 0)


def quickstart(options: argparse.Namespace) -> dict[str, Any]:
    config = json.loads((REPOSITORY / "configs/quickstart.json").read_text())
    config["parallel"] = {"replicas": options.replicas}
    config["training"]["train_iters"] = config["evaluation"]["interval"] = options.steps
    config["scheduler"]["params"]["total_num_steps"] = options.steps
    there, here = (
        losses(launched(config, options.replicas, environ)[0][0])
        for environ in ({}, {"CUDA_VISIBLE_DEVICES": ""})
    )
    apart = max(abs(one - other) for one, other in zip(there, here, strict=True))
    return {
        "figure": f"{there[-1]:.4f} nats per token",
        "peer": f"{here[-1]:.4f} on the CPU, {apart:.4f} apart at most",
        "problem": "" if apart < _DIFFER else f"losses differ: on the GPU {there}, on the CPU {here}",
    }


def losses(replica: ReplicaLog) -> list[float]:
    """Return the training losses of a replica, and last that of the mean model on validation data."""
    losses = [row["train/loss"] for row in replica.rows_of("step")]
    return [*losses, replica.rows_of("evaluation")[-1]["validation/mean_model_loss"]]


def memory(options: argparse.Namespace) -> dict[str, Any]:
    config = RunConfig(**timed_config(options, noloco(options)))
    found = dry_run(config, config.architecture(SIZES[options.size].vocabulary))
    return {
        "figure": f"{found.measured / 1e9:.2f} GB",
        "peer": f"{found.computed.device_bytes / 1e9:.2f} GB by plan",
    }


def rounds(options: argparse.Namespace) -> dict[str, Any]:
    with_rounds = seconds_per_step(options, noloco(options))
    without = seconds_per_step(options, {"enabled": False})
    return {
        "figure": f"{with_rounds:.4f} s a step, {without / with_rounds:.4f} of the speed without rounds",
        "peer": f"{without:.4f} s without rounds",
    }


def overlap(options: argparse.Namespace) -> dict[str, Any]:
    at_once, delayed = (
        statistics.median(row["round/pause_seconds"] for row in timed_rows(options, noloco(options) | delay))
        for delay in ({}, {"overlap_steps": 1})
    )
    return {"figure": f"{delayed:.3f} s a round, with a delay of a step", "peer": f"{at_once:.3f} s without"}


def noloco(options: argparse.Namespace) -> dict[str, Any]:
    return {"local_steps": options.local_steps, "slow_weights": "device"}


def seconds_per_step(options: argparse.Namespace, block: dict[str, Any]) -> float:
    return statistics.median(row["speed/seconds_per_step"] for row in timed_rows(options, block))


def timed_rows(options: argparse.Namespace, block: dict[str, Any]) -> list[Row]:
    """Return a row for each local phase but the first, in which kernels are compiled."""
    config = timed_config(options, block)
    return launched(config, options.replicas)[0][0].rows_of("step")[1:]


def timed_config(options: argparse.Namespace, block: dict[str, Any]) -> dict[str, Any]:
    size = SIZES[options.size]
    config = config_of(size, options.precision)
    config |= {"noloco": block, "parallel": {"replicas": options.replicas}, "evaluation": {"iters": 0}}
    config["model"] |= {"vocab_size": size.vocabulary}
    config["data"] = {"text": "python-stdlib", "tokenizer_type": "byte"}
    # As many tokens in a step however many replicas share the GPU's memory.
    share = min(options.replicas, size.micro_batch)
    config["train_micro_batch_size_per_gpu"] //= share
    config["gradient_accumulation_steps"] *= share
    config["training"] = {"train_iters": options.steps, "log_interval": options.local_steps}
    return config


WAYS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "quickstart": quickstart,
    "memory": memory,
    "rounds": rounds,
    "overlap": overlap,
}

if __name__ == "__main__":
    main()
