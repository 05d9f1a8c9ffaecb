"""A release, and the library on its own: the wheel, in an empty environment, runs the examples."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from itertools import chain
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported

import deepspeed
import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import Tensor

from megatron_noloco.outer import OuterOptimizer, TorchWeights
from megatron_noloco.plans.grouping import Group, Grouping
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import NolocoSettings
from megatron_noloco.transport.torch_dist import TorchTransport
from tests.kit.jobs import run_jobs
from tests.kit.ranks import REPOSITORY, example, key_file, run_ranks, run_script

EXAMPLE = REPOSITORY / "examples" / "plain_torch.py"
PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")


class Release(NamedTuple):
    """The files of a release."""

    sdist: Path
    wheel: Path  # made from the sdist


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("release")
    for name in tracked():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / "source" / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    call(sys.executable, "-c", build, str(folder), cwd=folder / "source")
    (sdist,) = folder.glob("*.tar.gz")
    call(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(sdist))
    (wheel,) = folder.glob("*.whl")
    return Release(sdist, wheel)


def tracked() -> set[str]:
    """The files of the repository that git knows."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is no clone")
    return set(call("git", "ls-files", cwd=REPOSITORY).splitlines())


def install(wheel: Path, extras: Sequence[str] = ()) -> Path:
    """The folder `bin` of a new virtual environment: our wheel, what it requires with these extras, no more."""
    venv = wheel.with_name("-".join(["venv", *extras]))
    call(sys.executable, "-m", "venv", "--without-pip", str(venv))
    call(*PIP, "--python", str(venv / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    (site,) = venv.glob("lib/python*/site-packages")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = (project["optional-dependencies"][extra] for extra in extras)
    texts = [*project["dependencies"], *chain.from_iterable(optional)]
    for name in with_requirements({Requirement(text).name for text in texts}):
        link_into(site, name)
    return venv / "bin"


@pytest.fixture(scope="module")
def environment(release: Release) -> Path:
    return install(release.wheel)


def call(*command: str, code: int = 0, cwd: Path | None = None) -> str:
    """What a command prints, on stdout and stderr, without our environment; by default outside the repository."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK")}
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=cwd or Path(command[0]).parent, env=environ
    )
    assert finished.returncode == code, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


def with_requirements(names: set[str]) -> set[str]:
    """These installed packages, and all that they need without any extra."""
    found: set[str] = set()
    while names:
        found |= names
        texts = [text for name in names for text in distribution(name).requires or []]
        needed = [Requirement(text) for text in texts]
        names = {
            need.name for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})
        } - found
    return found


def link_into(site: Path, name: str) -> None:
    """Make an installed package importable from another environment."""
    files = distribution(name).files or []
    tops = {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        if not (site / top).exists() and not top.endswith(".pth"):
            (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))


def test_the_source_distribution_has_every_file(release: Release) -> None:
    with tarfile.open(release.sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert held >= tracked()
    more = {name for name in held - tracked() if not name.startswith("megatron_noloco.egg-info/")}
    assert more == {"PKG-INFO", "setup.cfg"}


def test_the_wheel_has_the_whole_package(release: Release) -> None:
    with zipfile.ZipFile(release.wheel) as archive:
        assert {*archive.namelist()} >= {name for name in tracked() if name.startswith("megatron_noloco/")}


@pytest.mark.slow
def test_wheel_can_give_its_own_config(release: Release, tmp_path: Path) -> None:
    there = install(release.wheel, ["trainer"])
    (quickstart,) = there.parent.glob("share/megatron-noloco/configs/quickstart.json")
    raw = json.loads(quickstart.read_text())
    raw["parallel"]["replicas"] = 2
    raw["training"] |= {"train_iters": 6, "log_interval": 3}
    raw["scheduler"]["params"] |= {"total_num_steps": 6, "warmup_num_steps": 2}
    (tmp_path / "run.json").write_text(json.dumps(raw))
    torchrun = [str(there / "python"), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    said = call(*torchrun, "-m", "megatron_noloco", "train", "--config", "run.json", cwd=tmp_path)
    assert "validation loss, mean model" in said
    assert "step 6 of 6" in call(
        str(there / "megatron-noloco"), "watch", "--once", "runs/quickstart", cwd=tmp_path
    )


@pytest.mark.slow
def test_attach_runs_where_only_its_extra_is_installed(release: Release, tmp_path: Path) -> None:
    python, script = install(release.wheel, ["federation"]) / "python", EXAMPLE.with_stem("separate_jobs")
    key_file(tmp_path.parent, f"{tmp_path.name}.key")
    command = (str(python), str(script), "--folder", str(tmp_path), "--steps", "20", "--slot")
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda slot: call(*command, slot), ("0", "1"))
    assert "step 20: loss" in first
    ends = ([line for line in out.splitlines() if line.startswith("finished")] for out in (first, second))
    assert next(ends) == next(ends) != [], "one model in the end"


# Ranks are forked instead of spawned: the imports of torch are paid for once.
FORKED = """
import functools, runpy, sys, torch.multiprocessing as mp
mp.spawn = functools.partial(mp.start_processes, start_method="fork")
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_example_needs_only_torch_and_numpy(environment: Path) -> None:
    said = call(str(environment / "python"), "-c", FORKED, str(EXAMPLE))
    losses = re.findall(r"^step \d+: loss (\S+), partner \[\d\], spread \d", said, re.M)
    assert len(losses) == 20
    assert float(losses[-1]) < 0.1 * float(losses[0])


def test_the_library_imports_nothing_of_the_trainer(environment: Path) -> None:
    script = (
        "import megatron_noloco, megatron_noloco.outer, megatron_noloco.plans.stability\n"
        "import megatron_noloco.transport.torch_dist, sys\n"
        "import megatron_noloco.transport.mpi\n"  # imports mpi4py when it is used
        "print(megatron_noloco.__file__)\n"
        "print([name for name in ('deepspeed', 'megatron', 'mpi4py') if name in sys.modules])\n"
    )
    where, imported = call(str(environment / "python"), "-c", script).splitlines()
    assert where.startswith(str(environment.parent))
    assert imported == "[]"


def test_the_command_says_how_to_install_the_trainer(environment: Path) -> None:
    config = str(REPOSITORY / "configs" / "quickstart.json")
    for command in ([environment / "megatron-noloco"], [environment / "python", "-m", "megatron_noloco"]):
        (line,) = call(*map(str, command), "train", config, code=2).splitlines()
        assert "this command needs packages that are not installed (deepspeed, megatron, " in line
        assert line.endswith("; pip install 'megatron-noloco[trainer]'")


class PairsOfTheMinimalExample(Grouping):
    def groups(self, round_index: int, stage: int = 0, fragment: int = 0) -> list[Group]:
        partner_of = example("minimal_noloco").partner_of
        pairs = {
            tuple(sorted({replica, partner_of(replica, self.replicas, round_index)}))
            for replica in range(self.replicas)
        }
        return sorted(pairs)


def in_production(rank: int, world_size: int) -> Tensor:
    """The minimal example's training, with our outer optimizer in the place of its rounds."""
    minimal = example("minimal_noloco")
    replica, transport = minimal.Replica(rank, world_size), TorchTransport()
    weights = TorchWeights(replica.model.parameters())
    settings = NolocoSettings(
        payload="fp32",
        local_steps=minimal.K,
        outer_momentum=minimal.ALPHA,
        outer_lr=minimal.BETA,
        consensus_weight=minimal.GAMMA,
    )
    outer = OuterOptimizer(weights, transport, Place(rank, world_size), settings)
    outer.grouping = PairsOfTheMinimalExample(world_size, 2, 0)
    for step in range(minimal.STEPS):
        replica.local_step()
        outer.after_local_step(step + 1)
    dist.barrier()
    return weights.read()


def test_minimal_example_equals_production_weights() -> None:
    """To rounding: the same sums, in another order. Each replica of three skips some rounds."""
    minimal = example("minimal_noloco")
    found = torch.stack(run_ranks(3, lambda rank, world_size: minimal.Replica(rank, world_size).train()))
    expected = torch.stack(run_ranks(3, in_production))
    assert (found - found.mean(dim=0)).norm() > 0.01, "replicas differ"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_the_minimal_example_is_a_page() -> None:
    assert len(EXAMPLE.with_stem("minimal_noloco").read_text().splitlines()) <= 100


def test_a_loop_around_deepspeeds_engine() -> None:
    def run(rank: int, world_size: int) -> str:
        deepspeed.ops.__compatible_ops__ = {}  # else DeepSpeed compiles its collectives for two minutes
        return run_script(EXAMPLE.with_stem("deepspeed_engine"), "--zero-stage", "1")

    text, *_ = run_ranks(2, run, timeout=240)
    said = re.findall(r"^step (\d+): loss (\S+), spread (\S+)$", text, re.M)
    assert [int(step) for step, _, _ in said] == [10, 20, 30, 40, 50, 60]
    assert float(said[-1][1]) < 0.7 * float(said[0][1])
    assert all(float(spread) > 0 for _, _, spread in said)


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of this torch does not run on a CPU"
)
def test_a_loop_around_a_module_of_fully_shard() -> None:
    def run(rank: int, world_size: int) -> str:
        dist.barrier()  # all have joined
        dist.destroy_process_group()  # the example begins one of its own
        return run_script(EXAMPLE.with_stem("fully_shard"))

    texts = run_ranks(4, run)
    losses = re.findall(r"^step \d+: loss (\S+), spread \d", texts[0], re.M)
    assert len(losses) == 6
    assert float(losses[-1]) < 0.7 * float(losses[0])
    norms = [re.findall(r"the weights have the norm (\S+)$", text, re.M) for text in texts]
    assert norms == [norms[0]] * 4


def of_one_rank(slot: int, rank: int, *arguments: str) -> str:
    return run_script(EXAMPLE.with_stem("separate_jobs"), "--slot", str(slot), *arguments)


def test_separate_jobs_end_with_one_model_and_continue(tmp_path: Path) -> None:
    """They exchange, and end with one model; started again, they continue from their checkpoints."""
    key_file(tmp_path.parent, f"{tmp_path.name}.key")
    for begin, end in ((0, 50), (50, 100)):
        arguments = ["--folder", str(tmp_path), "--steps", str(end)]
        said = [text for (text,) in run_jobs(tmp_path, 2, 1, of_one_rank, *arguments)]
        for text in said:
            rounds = re.findall(r"^step (\d+): loss (\S+), group \(0, 1\), spread (\S+)$", text, re.M)
            assert [int(step) for step, *_ in rounds] == list(range(begin + 10, end + 1, 10))
        norms = [re.findall(r"the weights have the norm (\S+)$", text, re.M) for text in said]
        assert norms[0] == norms[1]
        assert len(norms[0]) == 1
    assert float(rounds[-1][1]) < 0.3, "of 0.8 without learning"
