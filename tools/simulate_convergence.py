"""Train many replicas of a small Llama in one process: how a method learns, without processes or a network.

    python -m tools.simulate_convergence CONFIG --set parallel.replicas=8 --set noloco.local_steps=10

Takes the trainer's JSON with the block "simulator" (tools/simulator/own.py); `--set BLOCK.FIELD=VALUE` changes
it, with JSON values. Uses the trainer's plans, data, initial weights and `megatron_noloco.outer`, and gives the
trainer's losses to rounding. Prints one JSON object.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_noloco.job.start_up import before_engines

before_engines()  # before Megatron-core and DeepSpeed are imported

from megatron_noloco.config import RunConfig
from tools.options import add_changes, apply, command_line
from tools.simulator.own import take_own
from tools.simulator.simulation import Simulation


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("config", type=Path, help="the JSON of a run")
    add_changes(parser, "the JSON")
    parser.add_argument("--threads", type=int, help="of torch; default: all cores")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    raw = json.loads(options.config.read_text())
    for change in options.set:
        apply(raw, change)
    try:
        own = take_own(raw)
        simulation = Simulation(RunConfig(**raw), **own)
    except ValueError as error:
        sys.exit(str(error))
    started, evaluations = time.perf_counter(), []
    for evaluation in simulation.run():
        evaluations.append(asdict(evaluation))
        print(f"step {evaluation.step}: mean model {evaluation.mean_model_loss:.4f}", file=sys.stderr)
    seconds = time.perf_counter() - started
    print(json.dumps({"changes": options.set, "seconds": round(seconds, 1), "evaluations": evaluations}))


if __name__ == "__main__":
    main()
