"""Converts files of other programs to a config, with an account of every setting."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_noloco.config import RunConfig
from megatron_noloco.config.data_block import SOURCES
from megatron_noloco.config.deepspeed_block import MICRO, STEPS, TRAIN
from megatron_noloco.config.load import read_content
from megatron_noloco.config.run_config import BLOCKS
from megatron_noloco.convert.draft import Draft
from megatron_noloco.convert.given import Setting, read
from megatron_noloco.convert.sizes import settle_model
from megatron_noloco.convert.units import (
    settle_batch,
    settle_data,
    settle_intervals,
    settle_layout,
    settle_length,
    settle_optimizer,
    settle_precision,
    settle_schedule,
)
from megatron_noloco.errors import UserError, prefix_errors_with
from megatron_noloco.fields import shown

_PRECISION = ("bf16", "fp16")


class Conversion(NamedTuple):
    """A config, and what became of each setting.

    Attributes:
        content: the JSON object of the config.
        settings: those of the files, with their values.
        carried: settings that have the same name here.
        renamed: settings that have another name here, with the fields that they became.
        meaningless: settings that have no meaning here, and why.
        no_equal: settings that have no equal here, and what to do.
        defaults: settings that the files leave to their program's defaults, with their values.
    """

    content: dict[str, Any]
    settings: Mapping[Setting, Any]
    carried: list[Setting]
    renamed: dict[Setting, list[str]]
    meaningless: dict[Setting, str]
    no_equal: dict[Setting, str]
    defaults: dict[Setting, Any]


def convert(
    paths: Sequence[Path],
    base: Path | None = None,
    world_size: int | None = None,
    replicas: int | None = None,
) -> Conversion:
    """Return the config that files of other programs describe together.

    Args:
        base: a config, or a part of one, that has what the files do not say.
        world_size: ranks of the run; None: as the files say.
        replicas: copies of the model that average with each other; None: one for each node, or data-parallel rank.

    Raises UserError, a line per problem.
    """
    settings = {setting: value for path in paths for setting, value in read(path).items()}
    rest = _rest(base) if base else {}
    draft = Draft(settings)
    layout = {f"parallel.{name}": size for name, size in rest.get("parallel", {}).items()}
    draft.fields = layout | draft.fields
    settle_model(draft)
    dp = settle_layout(draft, world_size, replicas)
    batch = settle_batch(draft, dp)
    steps = settle_length(draft, batch, rest.get("training", {}).get("train_iters"))
    settle_optimizer(draft)
    settle_schedule(draft, steps, batch)
    settle_precision(draft)
    settle_intervals(draft, steps)
    settle_data(draft)
    content = _merged(draft, rest)
    _check(draft, content, base)
    return _account(draft, content)


def _rest(path: Path) -> dict[str, Any]:
    """Return what a config says, which need not be whole; raises UserError."""
    with prefix_errors_with(str(path)):
        content = read_content(path)
        if wrong := [name for name in BLOCKS if not isinstance(content.get(name, {}), dict)]:
            raise UserError(f"{wrong[0]}: must be an object")
    return content


def _merged(draft: Draft, rest: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a draft in the order of a config, with the rest below them."""
    fields = {name: value for name, value in draft.fields.items() if not name.startswith("facts.")}
    blocks = {name.partition(".")[0] for name in fields}
    replaced = blocks & {"optimizer", "scheduler"}
    replaced |= {"model"} & blocks if "model.num_layers" in fields else set()
    replaced |= {TRAIN, MICRO, STEPS} if MICRO in fields else set()
    replaced |= {*_PRECISION} if blocks & {*_PRECISION} else set()
    content = {name: value for name, value in rest.items() if name not in replaced}
    outdated = set(SOURCES) if any(f"data.{name}" in fields for name in SOURCES) else set()
    outdated |= {"tokenizer_type"} if "data.tokenizer_model" in fields else set()
    if outdated and "data" in content:
        content["data"] = {name: value for name, value in content["data"].items() if name not in outdated}
    for name, value in fields.items():
        block = content
        *above, last = name.split(".")
        for part in above:
            if not isinstance(inner := block.get(part, {}), dict):
                raise UserError(f"{draft.where(part)}: must be an object, got {shown(inner)}")
            block[part] = dict(inner)
            block = block[part]
        block[last] = value
    names = dict.fromkeys([*RunConfig.model_fields, *content])
    return {
        name: _in_order(content[name], getattr(BLOCKS.get(name), "model_fields", ("type", "params")))
        for name in names
        if content.get(name) is not None and name != "$schema"
    }


def _in_order(block: Any, names: Iterable[str]) -> Any:
    """Return the values of a block in this order, further values at the end; any other value as it is."""
    if not isinstance(block, dict):
        return block
    return {name: block[name] for name in names if name in block} | block


def _check(draft: Draft, content: dict[str, Any], base: Path | None) -> None:
    """Raise UserError where the config is wrong, with the setting of each problem."""
    data = content.get("data", {})
    has_dataset = not data.keys().isdisjoint(("data_path", "train_data_path"))
    if has_dataset and data.keys().isdisjoint(("tokenizer_model", "tokenizer_type")):
        raise UserError(
            "the files do not say it: data.tokenizer_model is missing, the folder with the tokenizer.json of the "
            "dataset; add --config FILE, a config that does"
        )
    try:
        RunConfig(**content)
    except UserError as error:
        raise UserError("\n".join(_of_files(draft, line, base) for line in str(error).splitlines())) from None


def _of_files(draft: Draft, line: str, base: Path | None) -> str:
    field = line.split(" ")[0].rstrip(":")
    if where := draft.where(field):
        return f"{where}: {line}"
    if " is missing" in line.split("(")[0]:
        return f"the files do not say it: {line}; add --config FILE, a config that does"
    return f"{base}: {line}" if base else line


def _account(draft: Draft, content: dict[str, Any]) -> Conversion:
    """Put each setting into one list."""
    carried, renamed = list[Setting](), dict[Setting, list[str]]()
    meaningless = dict[Setting, str]()
    for setting in draft.settings.keys() - draft.advice.keys():
        results = draft.results(setting)
        if not results:
            meaningless[setting] = draft.why.get(setting, "other settings decide it")
        elif all(_has_name(field, setting.name) for field in results):
            carried.append(setting)
        else:
            renamed[setting] = _shortened(results)
    defaults = {one: one.program.defaults[one.name] for one in draft.defaults.values() if draft.results(one)}
    return Conversion(content, draft.settings, carried, renamed, meaningless, draft.advice, defaults)


def _has_name(field: str, name: str) -> bool:
    """Return whether a field, or the block that it is in, has the name of a setting."""
    return field.startswith(f"{name}.") or field.rpartition(".")[2] == name.rpartition(".")[2]


def _shortened(fields: list[str]) -> list[str]:
    """Return the names of fields; of many of one block that of the block."""
    blocks = [name.partition(".")[0] for name in fields]
    return [f"{blocks[0]}.*"] if len(fields) > 3 and len({*blocks}) == 1 else fields


def account_lines(conversion: Conversion) -> Iterator[str]:
    """Yield what became of each setting, list by list."""
    values = {**conversion.settings, **conversion.defaults}

    def named(settings: Iterable[Setting]) -> str:
        return ", ".join(f"{one.name} {shown(values[one])}" for one in sorted(settings))

    if conversion.carried:
        yield f"carried over: {named(conversion.carried)}"
    if conversion.renamed:
        yield "has another name here:"
        yield from (
            f"  {named([one])} -> {', '.join(there)}" for one, there in sorted(conversion.renamed.items())
        )
    if conversion.meaningless:
        yield "has no meaning here:"
        for why in sorted({*conversion.meaningless.values()}):
            names = sorted(one.name for one, other in conversion.meaningless.items() if other == why)
            yield f"  {', '.join(names)}: {why}"
    if conversion.no_equal:
        yield "has no equal here:"
        for one, advice in sorted(conversion.no_equal.items()):
            yield f"  {one.name}{'' if one.file else ' (default)'} {shown(values.get(one))}: {advice}"
    if conversion.defaults:
        yield f"by default there, and so written here: {named(conversion.defaults)}"
    replicas = conversion.content.get("parallel", {}).get("replicas", 1)
    if replicas == 1:
        yield "parallel.replicas 1: no other replica to average with; more ranks make more (--world-size)"
    else:
        yield f"parallel.replicas {replicas}: a step has a part of the batch; search its learning rate with tune"
