"""Runs that are disturbed from outside, and a comparison of their files.

Forked ranks (`tests.kit.ranks.run_ranks`) execute the command line; a fault reaches one of them when it begins a
local step, or when it touches the checkpoint folder. Production code does not know of this.
"""

import contextlib
import io
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from copy import copy as copy_of
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.cli.main import main
from tests.kit.faults import die_at_touch
from tests.kit.ranks import RankFailedError, run_ranks
from tests.kit.tiny import already_joined, at_steps, metrics, tiny, write_config, write_text

# Depends on the run alone, not on the machine's speed.
EXACT = (
    "replica",
    "step",
    "train/consumed_samples",
    "train/learning_rate",
    "train/loss",
    "train/grad_norm",
    "train/loss_scale",
    "routing/share",
    "round/spread",
    "round/partners",
)


@dataclass(frozen=True)
class Fault:
    """A signal to one rank just before it begins a local step (counted from 0, over resumes)."""

    rank: int
    before_step: int
    signal: signal.Signals


@dataclass(frozen=True)
class Death:
    """SIGKILL for one rank, some milliseconds after its n-th touch of the checkpoint folder."""

    rank: int
    touch: int
    milliseconds: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank's command."""

    code: int
    out: str
    err: str


class Run:
    """A tiny run in a folder of its own, which can be launched several times."""

    def __init__(self, folder: Path, changes: Mapping[str, Any], text: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        ours = {
            "data": {"text": text or write_text(folder, 200_000)},
            "training": {"output_dir": str(folder), "train_iters": 20},
            "model": {"num_layers": 2},
            "gradient_accumulation_steps": 2,
        }
        self.raw = tiny(changes, tiny(ours))

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def step_folder(self, step: int) -> Path:
        return catalog.step_folder(self.checkpoints, step)

    def change(self, changes: Mapping[str, Any]) -> None:
        self.raw = tiny(changes, self.raw)

    def copy(self, folder: Path) -> "Run":
        """Return a copy of the run and of its files in another folder."""
        shutil.copytree(self.folder, folder)
        return self.clean(folder)

    def clean(self, folder: Path) -> "Run":
        """Return the same run, without files, in another folder."""
        run = copy_of(self)
        run.folder = folder
        run.change({"training": {"output_dir": str(folder)}})
        return run

    def arguments(self, changes: Mapping[str, Any] | None = None) -> list[str]:
        """Write the config with `changes`, and return the command line."""
        path = write_config(self.folder, tiny(changes, self.raw))
        return ["train", "--config", path, "--progress", "lines"]

    def launch(
        self, ranks: int, faults: Sequence[Fault | Death] = (), changes: Mapping[str, Any] | None = None
    ) -> list[Outcome]:
        """Launch the run; returns every rank's outcome."""
        return run_ranks(ranks, command, self.arguments(changes), faults)

    def launch_to_die(self, ranks: int, faults: Sequence[Fault | Death]) -> None:
        """Launch a run of which a rank is killed; the harness then kills the others, as launchers do."""
        with pytest.raises(RankFailedError, match=f"died with exit code -{signal.SIGKILL:d}"):
            self.launch(ranks, faults)

    def exact_metrics(self) -> list[list[dict[str, Any]]]:
        """Return, by replica and logged step, what must be the same in a disturbed run."""
        return [
            [
                {name: value for name, value in row.items() if name in EXACT or name.startswith("origin/")}
                for row in rows
            ]
            for rows in metrics(self.folder)
        ]


def command(
    rank: int, world_size: int, arguments: list[str], faults: Sequence[Fault | Death] = ()
) -> Outcome:
    """Run the command line on a rank of the harness."""
    already_joined()
    for fault in faults:
        if fault.rank == rank:
            if isinstance(fault, Death):
                die_at_touch("checkpoints/step_", fault.touch, fault.milliseconds)
            else:
                at_steps(partial(_signal_before_step, fault))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return Outcome(code, out.getvalue(), err.getvalue())


def _signal_before_step(fault: Fault, done: int) -> None:
    if done == fault.before_step:
        os.kill(os.getpid(), fault.signal)


def assert_same_state(found: Path, expected: Path) -> None:
    """Assert that two step folders hold the same state: tensor by tensor, not byte by byte."""
    names = {path.relative_to(expected) for path in expected.rglob("*") if path.is_file()}
    assert names == {path.relative_to(found) for path in found.rglob("*") if path.is_file()}
    assert names, f"nothing in {expected}"
    for name in sorted(names):
        difference = _difference(_content(found / name), _content(expected / name), str(name))
        assert difference is None, difference


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    manifest = json.loads(path.read_text())
    same = ("step", "consumed_samples", "topology", "position", "architecture", "layout", "engine")
    return {name: manifest[name] for name in same}


def _difference(found: Any, expected: Any, where: str) -> str | None:
    """Return the first place where two nested states differ in a bit, None where they do not."""
    if type(found) is not type(expected):
        return f"{where}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, Tensor):
        same = found.dtype == expected.dtype and torch.equal(found, expected)
        return None if same else f"{where}: tensors differ"
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return f"{where}: keys {sorted(found.keys() ^ expected.keys(), key=str)}"
        pairs = [(f"{where}[{key!r}]", found[key], expected[key]) for key in expected]
    elif isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return f"{where}: {len(found)} items instead of {len(expected)}"
        pairs = [(f"{where}[{place}]", *both) for place, both in enumerate(zip(found, expected, strict=True))]
    else:
        return None if found == expected else f"{where}: {found!r} instead of {expected!r}"
    return next((text for where, one, other in pairs if (text := _difference(one, other, where))), None)
