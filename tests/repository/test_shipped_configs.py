"""The files in configs/."""

import json
from pathlib import Path

import jsonschema
import pytest

from megatron_noloco.config import Known, RunConfig, describe, load_config, schema

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "configs" / "schema.json"
EDITOR = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
SHIPPED = sorted({*(ROOT / "configs").glob("*.json")} - {SCHEMA})


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_parse(path: Path) -> None:
    run = load_config(path)
    assert run.world_size is not None
    assert describe(Known(run, run.topology(run.world_size), run.architecture(257)))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_an_editor_accepts_the_shipped_configs(path: Path) -> None:
    content = json.loads(path.read_text())
    assert (path.parent / content["$schema"]) == SCHEMA
    for right in ({}, {"noloco": {"local_steps": "auto"}}):
        EDITOR.validate(content | right)
    for wrong in (
        {"noloko": {}},
        {"noloco": {"local_step": 5}},
        {"noloco": {"local_steps": 0}},
        {"model": {}},
    ):
        assert not EDITOR.is_valid(content | wrong)


def test_the_schema_is_that_of_the_fields() -> None:
    EDITOR.check_schema(EDITOR.schema)
    assert SCHEMA.read_text() == schema(), "megatron-noloco config --schema > configs/schema.json"


PAPERS = {
    "125m": 2**19,
    "1.3b": 2**20,
    "6.8b": 2**21,
}  # its models, and tokens of a local step of all replicas
WAYS = ("", "_diloco", "_synchronous", "_recipe")


@pytest.mark.parametrize("size", PAPERS)
def test_the_papers_models_differ_in_their_method_alone(size: str) -> None:
    """Table 1 of arXiv 2506.10911, and the same batch of all replicas for every way to train."""
    raw = {way: json.loads((ROOT / "configs" / f"llama_{size}{way}.json").read_text()) for way in WAYS}
    for way, content in raw.items():
        run = RunConfig(**content)
        assert run.world_size == (8 if size == "125m" else 64)
        replicas = run.topology(run.world_size).replicas
        assert replicas * run.replica_batch * run.model.seq_length == PAPERS[size]
        assert content["training"].pop("output_dir") == f"runs/llama_{size}{way}"
        of_method = {"noloco", "parallel"} | ({"optimizer"} if way == "_recipe" else set())
        assert {key for key in raw[""] | content if content.get(key) != raw[""].get(key)} <= of_method
    noloco, diloco = (RunConfig(**raw[way]).noloco for way in ("", "_diloco"))
    assert (noloco.outer_momentum, noloco.outer_lr, noloco.group_size, noloco.local_steps) == (
        0.5,
        0.7,
        2,
        50,
    )
    assert (diloco.outer_momentum, diloco.outer_lr, diloco.local_steps) == (0.3, 0.7, 100)
