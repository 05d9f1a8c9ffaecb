"""The rules of the house, proved by reading the imports of every file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "megatron_noloco"
ROOT = Path(__file__).parents[2]

# The rooms, from the ground up, and the rooms below that each may import.
MAY_IMPORT = {
    "spec": set(),
    "plans": set(),
    "config": {"plans", "spec"},
    "transport": {"plans", "config"},
    "outer": {"plans", "config", "transport"},
    "job": {"plans", "config", "transport"},
    "model": {"plans", "config", "transport", "pipeline", "huggingface"},
    "pipeline": {"plans", "config", "transport", "model"},
    "data": {"plans", "spec"},
    "preprocess": {"data", "plans", "spec"},
    "engine": {"plans", "config", "transport", "outer", "model", "pipeline"},
    "checkpoint": {"plans", "config", "outer", "model", "engine", "training"},
    "training": {"plans", "config", "transport", "outer", "model", "engine", "data", "pipeline", "checkpoint", "huggingface", "job"},
    "huggingface": {"plans", "config", "transport", "outer", "model", "engine", "data", "training", "pipeline", "checkpoint", "job"},
    "cli": {"plans", "config", "checkpoint", "spec", "data", "preprocess", "job", "training", "huggingface"},
}
ENTRANCE = f"{PACKAGE}/__main__.py"

# Engines have one door each: what lies outside, and the only place that may import it.
DOORS = {
    "deepspeed": (f"{PACKAGE}/engine/",),
    "megatron": (f"{PACKAGE}/model/", f"{PACKAGE}/pipeline/"),
    "mpi4py": (f"{PACKAGE}/transport/mpi.py",),
}


def imported_modules(tree: ast.Module, package: str) -> Iterator[str]:
    """Dotted names a file imports, at the top or in a function; `from a import b` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def violations(path: str, source: str) -> list[str]:
    """The rules that the file at `path` (relative to the repository) breaks, one line each."""
    tree = ast.parse(source, path)
    package = path.rpartition("/")[0].replace("/", ".")
    broken = [rule for module in imported_modules(tree, package) for rule in import_violations(path, module)]
    if path != ENTRANCE:
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        broken += [
            f"print, line {c.lineno}" for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"
        ]
    return broken


def import_violations(path: str, module: str) -> Iterator[str]:
    top, *rest = module.split(".")
    if top in DOORS and not path.startswith(DOORS[top]):
        doors = DOORS[top]
        yield f"only {' and '.join(doors)} {'imports' if len(doors) == 1 else 'import'} {top}"
    if module.startswith("megatron.training"):
        yield "nobody imports megatron.training"
    if top == "torch" and path.startswith(f"{PACKAGE}/plans/"):
        yield "plans imports no torch"
    if top == PACKAGE and path != ENTRANCE and rest and rest[0] in MAY_IMPORT:
        here = room_of(path)
        if rest[0] != here and rest[0] not in MAY_IMPORT.get(here, set()):
            yield f"{here or 'the package itself'} must not import {rest[0]}"


def room_of(path: str) -> str:
    """The room of a file; empty for a file that lies in the package itself."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else ""


FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_file_obeys_the_rules(path: str) -> None:
    assert violations(path, (ROOT / path).read_text()) == []


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in FILES} <= {"", *MAY_IMPORT}


def test_floors_have_no_circle() -> None:
    for room, below in MAY_IMPORT.items():
        for other in below:
            assert MAY_IMPORT[other] < below, f"{room} may import {other}, but not all that {other} may"


ONLY_MEGATRON = "only megatron_noloco/model/ and megatron_noloco/pipeline/ import megatron"


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("plans/a.py", "import torch.nn as nn", "plans imports no torch"),
        ("plans/a.py", "from megatron_noloco.outer.b import C", "plans must not import outer"),
        ("plans/a.py", "from ..outer import b", "plans must not import outer"),
        ("plans/a.py", "from .. import outer", "plans must not import outer"),
        ("transport/__init__.py", "from ..outer import b", "transport must not import outer"),
        ("data/a.py", "from megatron_noloco import engine", "data must not import engine"),
        ("__init__.py", "from .training import Trainer", "the package itself must not import training"),
        (
            "training/a.py",
            "def f():\n    import deepspeed.ops",
            "only megatron_noloco/engine/ imports deepspeed",
        ),
        ("engine/a.py", "from megatron import core", ONLY_MEGATRON),
        ("engine/a.py", "import_module('megatron.core')", ONLY_MEGATRON),
        ("data/dataset.py", "from megatron.core import datasets", ONLY_MEGATRON),
        ("model/a.py", "from megatron import training", "nobody imports megatron.training"),
        (
            "transport/tcp.py",
            "from mpi4py import MPI",
            "only megatron_noloco/transport/mpi.py imports mpi4py",
        ),
        ("outer/a.py", "def f():\n    print(1)", "print, line 2"),
    ],
)
def test_rules_notice(path: str, source: str, rule: str) -> None:
    assert violations(f"{PACKAGE}/{path}", source) == [rule]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__main__.py", "from megatron_noloco.training import trainer\nprint(1)"),
        ("outer/a.py", "from megatron_noloco.transport.protocol import Transport\nfrom . import b"),
        ("engine/a.py", "import deepspeed\nfrom ..model.stage import Stage"),
        ("model/a.py", "from megatron.core import parallel_state"),
        ("pipeline/a.py", "from megatron.core import pipeline_parallel"),
        ("transport/mpi.py", "from mpi4py import MPI"),
        ("data/a.py", "import megatron_noloco\nfrom megatron_noloco import __version__"),
    ],
)
def test_rules_allow(path: str, source: str) -> None:
    assert violations(f"{PACKAGE}/{path}", source) == []
