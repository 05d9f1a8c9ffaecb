"""Record trajectories of the NoLoCo authors' own optimizer, for the tests.

    git clone https://github.com/gensyn-ai/noloco somewhere
    python -m tools.peers.record somewhere > tests/unit/recorded/noloco_authors.json

Four processes over gloo train two small tensors with gradients that depend on rank and step. Kept of each round:
the fast weights of all replicas before it, its groups, and the weights after it. Nothing of their code is here.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from tools.options import command_line

RANKS, LOCAL_STEPS, ROUNDS, SHAPES = 4, 3, 5, ((2, 3), (4,))
OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "noloco": ("sparse_optimizer_c", "SparseOptimizerC", {"local_group_size": 2})
}
NUMBERS = {"outer_lr": 0.7, "outer_momentum": 0.5, "number_of_local_steps": LOCAL_STEPS, "lr": 0.1}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path, help="a clone of gensyn-ai/noloco")
    folder = parser.parse_args().folder.resolve()
    commit = subprocess.check_output(["git", "-C", str(folder), "rev-parse", "HEAD"], text=True).strip()
    found: dict[str, Any] = {"source": f"gensyn-ai/noloco {commit}", "numbers": NUMBERS, "shapes": SHAPES}
    for name, (_, _, more) in OPTIMIZERS.items():
        with TemporaryDirectory() as scratch:
            mp.start_processes(record, (name, folder, Path(scratch)), nprocs=RANKS, start_method="fork")
            ranks = [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(RANKS)]
        rounds = [
            {name: ranks[0][index][name] for name in ("groups",) if name in ranks[0][index]}
            | {side: [one[index][side] for one in ranks] for side in ("before", "after")}
            for index in range(ROUNDS)
        ]
        found[name] = {**more, "start": ranks[0][0]["start"], "rounds": rounds}
    json.dump(found, sys.stdout)


def record(rank: int, name: str, folder: Path, scratch: Path) -> None:
    """Train as one rank; leaves the rounds in a file."""
    file, class_name, more = OPTIMIZERS[name]
    store = dist.FileStore(str(scratch / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    spec = importlib.util.spec_from_file_location(file, folder / "src" / "noloco" / f"{file}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = nn.ParameterList([nn.Parameter(draw(*shape, seed=0)) for shape in SHAPES])
    optimizer = getattr(module, class_name)(model=model, dp_group=dist.group.WORLD, **NUMBERS, **more)
    rounds, start = [], flat(model)
    optimizer.local_optimizer.register_step_post_hook(lambda *_: seen.append(flat(model)))
    for step in range(ROUNDS * LOCAL_STEPS):
        seen: list[list[float]] = []
        for index, weight in enumerate(model):
            weight.grad = draw(*weight.shape, seed=1000 * rank + 10 * step + index + 1)
        optimizer.step()
        if (step + 1) % LOCAL_STEPS == 0:
            rounds.append({"start": start, "before": seen[0], "after": flat(model)})
            if size := more.get("local_group_size"):
                rounds[-1]["groups"] = module.batched(module.create_random_permutation(RANKS, step + 1), size)
    (scratch / f"{rank}.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flat(model: nn.ParameterList) -> list[float]:
    """Return all weights, with the digits that fp32 has."""
    return [float(f"{value:.8g}") for value in nn.utils.parameters_to_vector(model.parameters()).tolist()]


if __name__ == "__main__":
    main()
