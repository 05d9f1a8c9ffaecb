"""Runs of `train` with several replicas of one rank, which share one GPU; a step of the check for each.

    python -m tools.gpu_check.replicas quickstart | rounds | overlap [--replicas 4] [--size 125M] [--steps 150]

quickstart: the quickstart's run without pipeline stages; fails where its loss is not what it is on a CPU.
rounds: seconds of a local step with a round every 50, and without rounds.
overlap: seconds for which a round stops the local steps, with one step's delay and without.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

from megatron_noloco.monitor.numbers import Row
from tools.models import SIZES, config_of
from tools.options import command_line
from tools.runner import REPOSITORY, launched

QUICKSTART_LOSS = 1.2492  # of the same run on a CPU
_SEEDS_DIFFER = 0.03  # nats per token, at most
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
    print(json.dumps(WAYS[options.what](options)))


def quickstart(options: argparse.Namespace) -> dict[str, Any]:
    config = json.loads((REPOSITORY / "configs/quickstart.json").read_text())
    config["parallel"] = {"replicas": options.replicas}
    evaluation = rows(config, options.replicas, "evaluation")[-1]
    loss = evaluation["validation/mean_model_loss"]
    if not abs(loss - QUICKSTART_LOSS) < _SEEDS_DIFFER:
        raise SystemExit(f"{loss:.4f} nats per token; on a CPU {QUICKSTART_LOSS}")
    return {"figure": f"{loss:.4f} nats per token", "peer": f"{QUICKSTART_LOSS} on a CPU"}


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
    return rows(config, options.replicas, "step")[1:]


def rows(config: dict[str, Any], ranks: int, kind: str) -> list[Row]:
    """Run a config; returns the rows of replica 0. Raises SystemExit with the last output of a failed run."""
    return launched(config, ranks)[0][0].rows_of(kind)


WAYS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "quickstart": quickstart,
    "rounds": rounds,
    "overlap": overlap,
}

if __name__ == "__main__":
    main()
