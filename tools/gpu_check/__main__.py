"""Everything that a GPU is to prove, in one command: `make gpu-check`, or

    python -m tools.gpu_check [--output runs/gpu-check] [--only STEP ...] [--seconds 540]

Runs the steps of `steps.py` in order of importance, each in a process of its own under its own time limit. After
each, results.json and table.md in the folder have its outcome, STEP.log all that it said. The same command goes on
after the last finished step. --seconds ends the command before a step that might not end in
time. Steps that need more GPUs than are here wait; without a GPU, all of them.

Exit code 1 where a step failed.
"""

import sys
from pathlib import Path

import torch

from tools.gpu_check.steps import STEPS
from tools.options import command_line
from tools.runner import Results, run_all, table


def main() -> int:
    parser = command_line(__doc__, "python -m tools.gpu_check")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu-check"), help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="these steps alone")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all steps of this command")
    options = parser.parse_args()

    chosen = [step for step in STEPS if options.only is None or step.name in options.only]
    results = Results(options.output / "results.json")
    gpus = torch.cuda.device_count()
    for line in run_all(chosen, results, gpus, options.seconds):
        print(line, flush=True)
        (options.output / "table.md").write_text(table(STEPS, results.found))
    waiting = [step.name for step in chosen if step.name not in results.found]
    if waiting:
        reason = "no GPU" if gpus == 0 else f"{gpus} GPUs, {options.seconds:g} seconds"
        print(f"{reason}: these {len(waiting)} steps are waiting: {', '.join(waiting)}")
    return int(any(not results.found[step.name].passed for step in chosen if step.name in results.found))


if __name__ == "__main__":
    sys.exit(main())
