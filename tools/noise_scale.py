"""How noisy the gradient of a batch is during a simulated run: the gradient noise scale, in tokens.

    nice python -m tools.noise_scale tools/studies/recipe.json

Trains the "base" of a study, as tools.study does, with the changes of `--set`. At every evaluation it takes
gradients of the mean model on batches that are still to come, each of the size of a replica's. The noise scale
is tr(S) / |G|^2, with S the covariance of the gradient of one token and G the mean gradient (McCandlish et al.,
arXiv 1812.06162, eq. 2.9): in the gradient of a batch of that size, noise and signal are equal. Prints one JSON
object.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_noloco.job.start_up import before_engines

before_engines()  # before Megatron-core and DeepSpeed are imported

from megatron_noloco.config import RunConfig
from tools.options import add_changes, apply, command_line
from tools.simulator.simulation import Simulation


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("study", type=Path)
    add_changes(parser, "the base")
    parser.add_argument(
        "--batches",
        type=int,
        default=512,
        help="of a replica, for each measurement; rounded up to whole steps",
    )
    parser.add_argument("--compiled", action="store_true", help="as in tools.study")
    options = parser.parse_args()
    torch.set_num_threads(1)
    raw = json.loads(options.study.read_text())["base"]
    for change in options.set:
        apply(raw, change)
    try:
        simulation = Simulation(RunConfig(**raw), options.compiled)
    except ValueError as error:
        sys.exit(str(error))
    found = []
    for row in measure(simulation, options.batches):
        found.append(row)
        print(row, file=sys.stderr)
    print(json.dumps({"changes": options.set, "found": found}))


def measure(simulation: Simulation, batches: int) -> Iterator[dict[str, float]]:
    """Train, and measure at every evaluation."""
    tokens = simulation.plan.replica_batch * simulation.config.model.seq_length
    for evaluation in simulation.run():
        scale = tokens * noise_to_signal(simulation.gradients_to_come(evaluation.step, batches))
        yield {
            "step": evaluation.step,
            "mean_model_loss": evaluation.mean_model_loss,
            "noise_scale_tokens": scale,
        }


def noise_to_signal(gradients: Tensor) -> float:
    """Return the variance of a batch's gradient over the squared norm of its mean, without bias.

    Args:
        gradients: of as many batches of one size, shape [batches, elements].
    """
    variances, means = torch.var_mean(gradients.double(), dim=0)
    variance = float(variances.sum())
    return variance / (float(means.square().sum()) - variance / len(gradients))


if __name__ == "__main__":
    main()
