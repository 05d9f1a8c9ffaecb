"""Contract with the installed DeepSpeed: its sources are read, never imported (that would take seconds)."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_noloco.config import deepspeed_keys as keys
from megatron_noloco.config import deepspeed_values as values
from megatron_noloco.config.blocks import CheckpointConfig
from megatron_noloco.config.deepspeed_models import _models
from megatron_noloco.config.run_config import BLOCKS

# Where a function's `param_dict` (or `ds_config`) is the user's whole file.
READERS = {
    "runtime/config.py": {"param_dict"},
    "runtime/precision_config.py": {"param_dict"},
    "runtime/zero/config.py": {"param_dict"},
    "runtime/swap_tensor/aio_config.py": {"param_dict"},
    "runtime/activation_checkpointing/config.py": {"param_dict"},
    "runtime/tensor_parallel/config.py": {"ds_config"},
    "monitor/config.py": {"param_dict"},
    "comm/config.py": {"ds_config"},
    "profiling/config.py": {"param_dict"},
    "datastates/config.py": {"param_dict"},
    "utils/config.py": {"param_dict"},
}


def sources() -> Path:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("DeepSpeed is not installed")
    return Path(spec.submodule_search_locations[0])


def string_constants(root: Path) -> dict[str, str]:
    """NAME = "text" at module level, in every file that defines DeepSpeed's key names."""
    found = {}
    for path in [*root.rglob("constants.py"), *(root / reader for reader in READERS)]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                        found[target.id] = node.value.value
    return found


def read_keys(tree: ast.AST, dictionaries: set[str]) -> Iterator[ast.expr]:
    """The keys a file looks up, as expressions: d.get(KEY), d[KEY], KEY in d, get_scalar_param(d, KEY)."""

    def is_file(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in dictionaries

    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[key, *_]) if is_file(owner):
                yield key
            case ast.Call(func=ast.Name(id="get_scalar_param"), args=[owner, key, *_]) if is_file(owner):
                yield key
            case ast.Subscript(value=owner, slice=key) if is_file(owner):
                yield key
            case ast.Compare(left=key, ops=[ast.In()], comparators=[owner]) if is_file(owner):
                yield key


def test_every_key_deepspeed_reads_is_known() -> None:
    root = sources()
    constants = string_constants(root)
    found = set()
    for reader, dictionaries in READERS.items():
        for key in read_keys(ast.parse((root / reader).read_text(encoding="utf-8")), dictionaries):
            if isinstance(key, ast.Constant):
                found.add(key.value)
            elif isinstance(key, ast.Name) and key.id in constants:
                found.add(constants[key.id])
    assert {"train_batch_size", "bf16", "zero_optimization", "comms_logger", "aio"} <= found, (
        "reads too little"
    )
    assert found <= keys.TOP_LEVEL | keys.REMOVED, f"new in DeepSpeed: {sorted(found - keys.TOP_LEVEL)}"


def test_removed_keys_are_deepspeeds() -> None:
    tree = ast.parse((sources() / "runtime/config.py").read_text(encoding="utf-8"))
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and getattr(node.targets[0], "id", "") == "_REMOVED_TOP_LEVEL_CONFIG_KEYS"
    ]
    assert {key.value for key in table.keys if isinstance(key, ast.Constant)} == keys.REMOVED


def test_every_checked_block_is_deepspeeds() -> None:
    assert keys.CHECKED <= keys.TOP_LEVEL
    assert _models().keys() == keys.CHECKED


def test_the_checkpoint_keys_of_deepspeed_are_refused() -> None:
    """Its block has the name of ours."""
    constants = ast.parse((sources() / "runtime/constants.py").read_text(encoding="utf-8"))
    values = {
        node.targets[0].id: node.value.value
        for node in constants.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    names = ("LOAD_UNIVERSAL_CHECKPOINT", "USE_NODE_LOCAL_STORAGE_CHECKPOINT", "CHECKPOINT_PARALLEL_WRITE")
    assert {values[name] for name in names} <= keys.CHECKPOINT
    assert not keys.CHECKPOINT & CheckpointConfig.model_fields.keys()


def test_the_parameters_of_every_schedule_are_known() -> None:
    tree = ast.parse((sources() / "runtime/lr_schedules.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, known in keys.SCHEDULES.items():
        (init,) = [
            node
            for node in classes[name].body
            if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        ]
        assert {arg.arg for arg in init.args.args} - {"self", "optimizer"} == known


def test_every_key_is_checked_refused_or_read_here() -> None:
    read_here = {"optimizer", "scheduler", "train_batch_size", "train_micro_batch_size_per_gpu"}
    read_here |= {"gradient_accumulation_steps", "bfloat16", *BLOCKS}
    checked = values.TOP_LEVEL.keys() | keys.CHECKED
    assert not keys.TOP_LEVEL - read_here - checked - keys.NOT_HERE.keys() - keys.DISABLED.keys()
    assert not checked & keys.NOT_HERE.keys()
    assert values.SCHEDULE.keys() == frozenset().union(*keys.SCHEDULES.values())


def test_the_lists_do_not_contradict_each_other() -> None:
    assert keys.NOT_HERE.keys() <= keys.TOP_LEVEL
    assert not keys.REMOVED & keys.TOP_LEVEL
