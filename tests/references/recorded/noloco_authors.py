"""Record trajectories of the NoLoCo authors' own optimizer, for the tests.

    git clone https://github.com/gensyn-ai/noloco somewhere
    python tests/references/recorded/noloco_authors.py somewhere > tests/references/recorded/noloco_authors.json

Four processes over gloo train two small tensors with gradients that depend on rank and step. Kept of each round:
the fast weights of all replicas before it, its groups, and the weights after it. Nothing of their code is here.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

RANKS, LOCAL_STEPS, ROUNDS, GROUP, SHAPES = 4, 3, 5, 2, ((2, 3), (4,))
NUMBERS = {"outer_lr": 0.7, "outer_momentum": 0.5, "number_of_local_steps": LOCAL_STEPS, "lr": 0.1}


def main() -> None:
    folder = Path(sys.argv[1]).resolve()  # a clone of gensyn-ai/noloco
    commit = subprocess.check_output(["git", "-C", str(folder), "rev-parse", "HEAD"], text=True).strip()
    with TemporaryDirectory() as scratch:
        mp.start_processes(record, (folder, Path(scratch)), nprocs=RANKS, start_method="fork")
        ranks = [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    rounds = [
        {"groups": of_ranks[0]["groups"]}
        | {side: [one[side] for one in of_ranks] for side in ("before", "after")}
        for of_ranks in zip(*ranks, strict=True)
    ]
    recorded = {"local_group_size": GROUP, "start": ranks[0][0]["start"], "rounds": rounds}
    found = {"source": f"gensyn-ai/noloco {commit}", "numbers": NUMBERS, "shapes": SHAPES}
    json.dump(found | {"noloco": recorded}, sys.stdout)


def record(rank: int, folder: Path, scratch: Path) -> None:
    """Train as one rank; leaves the rounds in a file."""
    store = dist.FileStore(str(scratch / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    sys.path.insert(0, str(folder / "src" / "noloco"))
    module = importlib.import_module("sparse_optimizer_c")
    model = nn.ParameterList([nn.Parameter(draw(*shape, seed=0)) for shape in SHAPES])
    optimizer = module.SparseOptimizerC(
        model=model, dp_group=dist.group.WORLD, local_group_size=GROUP, **NUMBERS
    )
    rounds, start = [], flat(model)
    optimizer.local_optimizer.register_step_post_hook(lambda *_: seen.append(flat(model)))
    for step in range(ROUNDS * LOCAL_STEPS):
        seen: list[list[float]] = []
        for index, weight in enumerate(model):
            weight.grad = draw(*weight.shape, seed=1000 * rank + 10 * step + index + 1)
        optimizer.step()
        if (step + 1) % LOCAL_STEPS == 0:
            groups = module.batched(module.create_random_permutation(RANKS, step + 1), GROUP)
            rounds.append({"start": start, "before": seen[0], "after": flat(model), "groups": groups})
    (scratch / f"{rank}.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flat(model: nn.ParameterList) -> list[float]:
    """Return all weights, with the digits that fp32 has."""
    return [float(f"{value:.8g}") for value in nn.utils.parameters_to_vector(model.parameters()).tolist()]


if __name__ == "__main__":
    main()
