"""Rules of the house that ruff and import-linter (pyproject.toml) do not know, and what pages say of imports."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGE = "megatron_noloco"
ROOT = Path(__file__).parents[2]
FILES = {
    path.relative_to(ROOT / PACKAGE).as_posix(): path.read_text() for path in (ROOT / PACKAGE).rglob("*.py")
}
# What also runs in programs of users, which may have set another default dtype or device
ANY_DEFAULTS = ("attach/", "checkpoint/", "engine/", "federation/", "job/", "outer/", "transport/")
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros"),
}
# What DeepSpeed's optimizers and parameters have and its documentation does not promise: only its door names it.
INSIDES_OF_DEEPSPEED = re.compile(
    r"\b(bf16_groups|bit16_groups|ds_numel|ds_process_group|ds_tensor|fp16_groups|fp16_groups_flat|fp32_groups"
    r"|fp32_groups_flat|fp32_groups_flat_partition|fp32_partitioned_groups_flat|persistent_parameters"
    r"|real_dp_process_group|round_robin_bit16_groups|round_robin_bit16_offsets|single_partition_of_fp32_groups"
    r"|swap_optimizer|update_lp_params)\b"
)
# Beside what ruff finds: docs/faults.md says that nothing received is evaluated.
EVALUATED = re.compile(r"torch\.load\((?!.*weights_only=True)|\ballow_pickle\b|trust_remote_code=True")


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
                yield f"torch.{name}, line {node.lineno}"
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from (f"{name.name}, line {node.lineno}" for name in node.names if name.name in FACTORIES)


def test_every_tensor_has_its_dtype_and_device() -> None:
    found = {path: list(made_by_default(FILES[path])) for path in FILES if path.startswith(ANY_DEFAULTS)}
    assert {path: made for path, made in found.items() if made} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from torch import zeros",
        "torch.empty(0)",
        "torch.zeros(3, dtype=torch.int8)",
        "torch.tensor(1.0, device='cpu')",
        "partial(torch.ones, dtype=torch.int8, device='cpu')",
    ],
)
def test_a_tensor_made_by_default_is_noticed(source: str) -> None:
    (made,) = made_by_default(source)
    assert made.endswith("line 1")


@pytest.mark.parametrize(
    ("forbidden", "door"),
    [(INSIDES_OF_DEEPSPEED, "engine/"), (EVALUATED, "nowhere")],
    ids=["insides of DeepSpeed", "code in data"],
)
def test_only_the_door_names_it(forbidden: re.Pattern[str], door: str) -> None:
    lines = [
        f"{path}: {line}"
        for path, source in FILES.items()
        for line in source.splitlines()
        if not path.startswith(door) and forbidden.search(line.partition("  # ")[0])
    ]
    assert lines == []


def test_federation_map_orders_files_by_imports() -> None:
    room = f"{PACKAGE}.federation"
    lines = re.findall(r"^\| (`.*?) \|", FILES["federation/__init__.py"], re.MULTILINE)
    line_of = {f"{room}.{name}": at for at, line in enumerate(lines) for name in re.findall(r"`(\w+)`", line)}
    graph = grimp.build_graph(PACKAGE)
    assert line_of.keys() == graph.find_children(room)
    for module, at in line_of.items():
        for other in graph.find_modules_directly_imported_by(module) & line_of.keys():
            assert line_of[other] <= at, (module, other)


def picture() -> str:
    """The rooms as docs/architecture.md draws them: an arrow to each room below that no other arrow implies."""
    graph, below = grimp.build_graph(PACKAGE), dict[str, set[str]]()
    rooms = [room for room in graph.find_children(PACKAGE) if graph.find_children(room)]
    for room in rooms:
        graph.squash_module(room)
    for room in rooms:
        below[room] = (graph.find_modules_directly_imported_by(room) & set(rooms)) - {room}
    reach: dict[str, set[str]] = {}
    for room in TopologicalSorter(below).static_order():
        reach[room] = below[room].union(*(reach[other] for other in below[room]))
    arrows = {
        f"    {room.rpartition('.')[2]} --> {other.rpartition('.')[2]}"
        for room in rooms
        for other in below[room] - {far for near in below[room] for far in reach[near]}
    }
    return "\n".join(sorted(arrows))


def test_the_picture_shows_these_rooms() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    drawn = re.findall(r"^    \w+ --> \w+$", text, re.MULTILINE)
    assert "\n".join(sorted(drawn)) == picture()


def test_a_file_name_is_used_once_in_the_package() -> None:
    # A traceback, a search or a sentence that names `join.py` then means one file.
    names = Counter(path.rpartition("/")[2] for path in FILES)
    assert [name for name, count in names.items() if count > 1 and not name.startswith("__")] == []


def test_names_of_tests_are_short() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"def (test_\w+)", sources) if len(name) > 60] == []


def test_every_folder_of_tests_is_run() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert folders == set(settings["testpaths"])


def test_no_test_needs_another_test() -> None:
    """What several need is in tests/kit."""
    sources = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    needs = re.compile(r"^from tests\.\w+\.test_\w+ import", re.MULTILINE)
    assert [name for name, source in sources.items() if needs.search(source)] == []
