"""The rules of the house, proved by reading the imports of every file."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "megatron_noloco"
ROOT = Path(__file__).parents[2]

# The packages, from the ground up, and those below that each imports.
_BELOW = {
    "plans": "",
    "transport": "",
    "job": "transport",
    "outer": "plans transport job",
    "monitor": "plans job outer",
    "pipeline": "plans job monitor",
    "model": "plans pipeline",
    "data": "plans job monitor",
    "engine": "plans job outer monitor pipeline model",
    "config": "plans model data engine",
    "checkpoint": "plans job outer model engine",
    "huggingface": "plans job pipeline model data config checkpoint",
    "convert": "model config huggingface",
    "federation": "plans transport job outer",
    "preflight": "plans outer job monitor model data engine config federation",
    "training": "plans transport job outer monitor pipeline model "
    "data engine config checkpoint huggingface federation preflight",
    "attach": "plans transport job outer model engine federation",
    "cli": "job outer monitor data config checkpoint huggingface convert federation preflight training",
}
MAY_IMPORT = {room: set(below.split()) for room, below in _BELOW.items()}
ENTRANCE = f"{PACKAGE}/__main__.py"
SETTINGS = f"{PACKAGE}/settings.py"
FIELDS = f"{PACKAGE}/fields.py"
CLI = f"{PACKAGE}/cli/"

# Engines have one door each: what lies outside, and the only places that may import it.
DOORS = {
    "deepspeed": (f"{PACKAGE}/engine/",),
    "megatron": (f"{PACKAGE}/model/", f"{PACKAGE}/pipeline/"),
    "mpi4py": (f"{PACKAGE}/transport/mpi.py", f"{PACKAGE}/job/"),
    "pydantic": (
        *(f"{PACKAGE}/config/", SETTINGS, FIELDS),
        *(f"{PACKAGE}/federation/", f"{PACKAGE}/training/replica_state.py"),  # what others send
        f"{PACKAGE}/preflight/invitation.py",
        f"{PACKAGE}/checkpoint/catalog.py",
    ),
    "cryptography": (f"{PACKAGE}/federation/keys.py",),
    "fsspec": (f"{PACKAGE}/federation/store.py",),
    "transformers": (f"{PACKAGE}/huggingface/", f"{PACKAGE}/data/", f"{PACKAGE}/attach/hf_trainer.py"),
}
# What DeepSpeed's optimizers and parameters have and its documentation does not promise: only its door names it.
INSIDES_OF_DEEPSPEED = {
    *("bf16_groups", "bit16_groups", "ds_numel", "ds_process_group", "ds_tensor", "fp16_groups"),
    *("fp16_groups_flat", "fp32_groups", "fp32_groups_flat", "fp32_groups_flat_partition"),
    *("fp32_partitioned_groups_flat", "persistent_parameters", "real_dp_process_group"),
    *("round_robin_bit16_groups", "round_robin_bit16_offsets"),
    *("single_partition_of_fp32_groups", "swap_optimizer", "update_lp_params"),
}
EVALUATING = {
    *("eval", "exec", "os.system", "os.popen", "torch.load"),
    *("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"),
}
# What builds nothing but numbers, texts, lists and objects of a YAML file
SAFE = {"yaml.MappingNode", "yaml.SafeLoader", "yaml.YAMLError"}
# Attributes with an underscore, of objects that other packages made, and the only places that may reach for them.
PRIVATE = {
    f"{PACKAGE}/engine/initialize.py": {
        "_get_expert_parallel_group_dict",
        "_get_expert_data_parallel_group_dict",
    },
    f"{PACKAGE}/engine/zero.py": {
        "_set_fp32_optimizer_param_groups",
        "_clear_fp32_optimizer_param_groups",
        "_reassign_or_swap_out_partitioned_parameters",
    },
    f"{PACKAGE}/attach/megatron_optimizer.py": {"_copy_main_params_to_model_params"},
    f"{PACKAGE}/attach/first_state.py": {"_non_persistent_buffers_set"},  # torch has no other access to them
    f"{PACKAGE}/pipeline/cpu.py": {"_get_cuda_rng_state", "_set_cuda_rng_state", "_GLOBAL_MEMORY_BUFFER"},
    f"{PACKAGE}/pipeline/groups.py": {
        *("_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", "_MODEL_PARALLEL_GROUP"),
        *("_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS", "_GLOBAL_MEMORY_BUFFER"),
        *("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP"),
        *("_CONTEXT_PARALLEL_GROUP", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    },
    f"{PACKAGE}/job/agreement.py": {"_get_default_store"},
    f"{PACKAGE}/job/leaving.py": {"_run_exitfuncs"},
    f"{PACKAGE}/training/prepare.py": {"_is_mkldnn_fp16_supported"},
    f"{PACKAGE}/cli/main.py": {"_SubParsersAction", "_actions"},
}
DOCUMENTED = {"_exit", "_replace", "_asdict"}  # of os and of named tuples
# What also runs in programs of users, which may have set another default dtype or device.
ANY_DEFAULTS = tuple(
    f"{PACKAGE}/{room}/"
    for room in ("attach", "checkpoint", "engine", "federation", "job", "outer", "transport")
)
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros"),
}
WITHOUT_TORCH = tuple(f"{PACKAGE}/{room}/" for room in ("plans", "config"))


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


def imports_of(path: str, source: str) -> list[str]:
    return list(imported_modules(ast.parse(source, path), path.rpartition("/")[0].replace("/", ".")))


def violations(path: str, source: str) -> list[str]:
    """The rules that the file at `path` (relative to the repository) breaks, one line each."""
    broken = [rule for module in imports_of(path, source) for rule in import_violations(path, module)]
    reached = private_names(source) - PRIVATE.get(path, set())
    broken += [f"{name} is private to another package" for name in sorted(reached)]
    if not path.startswith(DOORS["deepspeed"]):
        broken += [
            f"only {' and '.join(DOORS['deepspeed'])} may reach into deepspeed ({name})"
            for name in sorted(INSIDES_OF_DEEPSPEED & names_of_attributes(source))
        ]
    if path.startswith(ANY_DEFAULTS):
        broken += [f"{made} without dtype and device" for made in made_by_default(source)]
    if path != ENTRANCE and not path.startswith(CLI):
        calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
        broken += [
            f"print, line {c.lineno}" for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"
        ]
    return broken + [f"{name} evaluates what it is given" for name in sorted(evaluating(path, source))]


def evaluating(path: str, source: str) -> set[str]:
    """Return what would run code that data hold: docs/faults.md says that nothing received is evaluated."""
    found = {
        name for name in imports_of(path, source) if name.split(".")[0] in EVALUATING and name not in SAFE
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called, options = ast.unparse(node.func), {entry.arg: entry.value for entry in node.keywords}
            is_safe = called == "torch.load" and ast.unparse(options.get("weights_only", node)) == "True"
            if called in EVALUATING and not is_safe:
                found.add(called)
            found |= {f"{called}({name})" for name in ("shell", "allow_pickle") if name in options}
            found |= {called} if ast.unparse(options.get("trust_remote_code", node)) == "True" else set()
    return found


def made_by_default(source: str) -> Iterator[str]:
    """Tensors whose type or place is the default: a factory of torch must be called with dtype and device."""
    nodes = list(ast.walk(ast.parse(source)))
    right = {
        node.func
        for node in nodes
        if isinstance(node, ast.Call) and {"dtype", "device"} <= {one.arg for one in node.keywords}
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and node not in right:
            module, _, name = ast.unparse(node).rpartition(".")
            if module == "torch" and name in FACTORIES:
                yield f"torch.{name}, line {node.lineno},"
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from (f"{name.name}, line {node.lineno}," for name in node.names if name.name in FACTORIES)


def names_of_attributes(source: str) -> set[str]:
    """Attributes that a file reads or asks for; a string counts, as it does for getattr."""
    nodes = list(ast.walk(ast.parse(source)))
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return strings | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def private_names(source: str) -> set[str]:
    """Attributes with one underscore that the file itself does not define, of other objects than self."""
    nodes = list(ast.walk(ast.parse(source)))
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | DOCUMENTED
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in defined
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    }


def import_violations(path: str, module: str) -> Iterator[str]:
    top = module.split(".")[0]
    if top in DOORS and not path.startswith(DOORS[top]):
        yield f"only {' and '.join(DOORS[top])} may import {top}"
    if module.startswith("megatron.training"):
        yield "nobody imports megatron.training"
    if top == "torch" and path.startswith(WITHOUT_TORCH):
        yield f"{room_of(path)} imports no torch"
    here, there = room_of(path), room_of_module(module)
    allowed = MAY_IMPORT.get(here, {"plans"} if path == SETTINGS else set())
    if there and there != here and path != ENTRANCE and there not in allowed:
        yield f"{here or 'the package itself'} must not import {there}"


def room_of(path: str) -> str:
    """The package of a file; empty for a file that lies in the package itself."""
    below = "/".join(path.split("/")[1:-1])
    return next(
        (room for room in sorted(MAY_IMPORT, reverse=True) if f"{below}/".startswith(f"{room}/")), below
    )


def room_of_module(module: str) -> str:
    """The package that an imported name belongs to; empty for other packages, and for the package itself."""
    path = module.replace(".", "/")
    if not path.startswith(f"{PACKAGE}/"):
        return ""
    below = path.removeprefix(f"{PACKAGE}/")
    return next((room for room in sorted(MAY_IMPORT, reverse=True) if f"{below}/".startswith(f"{room}/")), "")


FILES = {
    path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}


def test_every_file_obeys_the_rules() -> None:
    assert {path: broken for path, source in FILES.items() if (broken := violations(path, source))} == {}


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in FILES} == {"", *MAY_IMPORT}


def test_every_permission_is_used() -> None:
    used: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for path, source in FILES.items():
        rooms = {room_of_module(module) for module in imports_of(path, source)}
        if room_of(path):
            used[room_of(path)] |= rooms - {"", room_of(path)}
    assert used == MAY_IMPORT
    assert {path: private_names(FILES[path]) for path in PRIVATE} == PRIVATE


def test_no_circle() -> None:
    """Neither between rooms nor between files, imports inside functions included."""
    tuple(TopologicalSorter(MAY_IMPORT).static_order())
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        named = imports_of(path, FILES[path])
        # `from a import b`: the module a.b where there is one, else a
        found = {name if name in modules else name.rpartition(".")[0] for name in named}
        graph[module] = (found & modules.keys()) - {module, PACKAGE}
    tuple(TopologicalSorter(graph).static_order())


def test_federation_map_orders_files_by_imports() -> None:
    folder = ROOT / PACKAGE / "federation"
    lines = re.findall(r"^\| (`.*?) \|", (folder / "__init__.py").read_text(), re.MULTILINE)
    line_of = {name: at for at, line in enumerate(lines) for name in re.findall(r"`(\w+)`", line)}
    assert line_of.keys() == {path.stem for path in folder.glob("*.py")} - {"__init__"}
    for name, at in line_of.items():
        path = folder / f"{name}.py"
        for module in imports_of(str(path.relative_to(ROOT)), path.read_text()):
            assert line_of.get(module.split(".")[2] if module.count(".") > 2 else "", 0) <= at, (name, module)


def picture() -> str:
    """The rooms as docs/architecture.md draws them: an arrow to each room below that no other arrow implies."""
    above = TopologicalSorter(MAY_IMPORT)
    reach: dict[str, set[str]] = {}
    for room in above.static_order():
        reach[room] = MAY_IMPORT[room].union(*(reach[other] for other in MAY_IMPORT[room]))
    lines = ["```mermaid", "graph TD"]
    for room, below in reversed(MAY_IMPORT.items()):
        implied = {far for near in below for far in reach[near]}
        lines += [f"    {room} --> {other}" for other in MAY_IMPORT if other in below - implied]
    return "\n".join([*lines, "```"])


def test_the_picture_shows_these_rooms() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert picture() in text, f"docs/architecture.md should hold:\n{picture()}"


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("plans/a.py", "import torch.nn as nn", "plans imports no torch"),
        ("plans/a.py", "from megatron_noloco.outer.b import C", "plans must not import outer"),
        ("plans/a.py", "from ..outer import b", "plans must not import outer"),
        ("plans/a.py", "from .. import outer", "plans must not import outer"),
        ("transport/__init__.py", "from ..outer import b", "transport must not import outer"),
        (
            "model/families/a.py",
            "from megatron_noloco.engine import initialize",
            "model must not import engine",
        ),
        ("__init__.py", "from .training import Run", "the package itself must not import training"),
        ("outer/a.py", "from megatron_noloco.config import RunConfig", "outer must not import config"),
        ("outer/a.py", "import pydantic", f"only {' and '.join(DOORS['pydantic'])} may import pydantic"),
        ("model/a.py", "from megatron import training", "nobody imports megatron.training"),
        ("outer/a.py", "def f():\n    print(1)", "print, line 2"),
        ("outer/a.py", "from torch import zeros", "zeros, line 1, without dtype and device"),
        *(
            ("outer/a.py", source, f"torch.{name}, line 1, without dtype and device")
            for source, name in [
                ("torch.empty(0)", "empty"),
                ("torch.zeros(3, dtype=torch.int8)", "zeros"),
                ("torch.tensor(1.0, device='cpu')", "tensor"),
                ("partial(torch.ones, dtype=torch.int8, device='cpu')", "ones"),
            ]
        ),
        ("attach/a.py", "engine.optimizer._clear()", "_clear is private to another package"),
        *(
            ("attach/a.py", source, f"{name} evaluates what it is given")
            for name, source in [
                ("eval", "eval(text)"),
                ("torch.load", "import torch\ntorch.load(file)"),
                ("torch.load", "torch.load(file, weights_only=False)"),
                ("pickle", "def f():\n    import pickle"),
                ("subprocess.run(shell)", "subprocess.run(command, shell=True)"),
                ("numpy.load(allow_pickle)", "numpy.load(file, allow_pickle=True)"),
                ("A.from_pretrained", "A.from_pretrained(folder, trust_remote_code=True)"),
            ]
        ),
        *(
            ("attach/a.py", source, "only megatron_noloco/engine/ may reach into deepspeed (fp16_groups)")
            for source in ("optimizer.fp16_groups", "hasattr(optimizer, 'fp16_groups')")
        ),
        *(
            (path, source, f"only {' and '.join(DOORS[engine])} may import {engine}")
            for path, source, engine in [
                ("training/a.py", "def f():\n    import deepspeed.ops", "deepspeed"),
                ("engine/a.py", "from megatron import core", "megatron"),
                ("engine/a.py", "import_module('megatron.core')", "megatron"),
                ("data/dataset.py", "from megatron.core import datasets", "megatron"),
                ("transport/tcp.py", "from mpi4py import MPI", "mpi4py"),
                ("transport/tcp.py", "import cryptography", "cryptography"),
            ]
        ),
    ],
)
def test_rules_notice(path: str, source: str, rule: str) -> None:
    assert violations(f"{PACKAGE}/{path}", source) == [rule]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__main__.py", "from megatron_noloco.cli import main\nprint(1)"),
        ("cli/a.py", "print(1)"),
        ("outer/a.py", "from megatron_noloco.transport.interface import Transport\nfrom . import b"),
        ("engine/a.py", "import deepspeed\nfrom ..pipeline.groups import Groups"),
        ("model/a.py", "from megatron.core import parallel_state\nfrom .families import llama"),
        ("transport/mpi.py", "from mpi4py import MPI"),
        ("data/a.py", "import megatron_noloco\nfrom megatron_noloco import __version__"),
    ],
)
def test_rules_allow(path: str, source: str) -> None:
    assert violations(f"{PACKAGE}/{path}", source) == []


def test_a_file_name_is_used_once_in_the_package() -> None:
    # A traceback, a search or a sentence that names `join.py` then means one file.
    names = Counter(path.name for path in (ROOT / PACKAGE).rglob("*.py") if not path.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_names_of_tests_are_short() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"def (test_\w+)", sources) if len(name) > 60] == []
