"""How fields and mistakes are put into words, for error lines and for `config --explain`."""

import difflib
import json
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megatron_noloco.model.families import FAMILIES

Path = tuple[str, ...]

# What users of Megatron, DeepSpeed, Hugging Face or DiLoCo write, in small letters, and the field that it is here,
# with the block where the name stands for a field in one block alone. A test compares them with docs/running.md.
ALIASES = {
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "num_micro_batches": "gradient_accumulation_steps",
    "clip_grad": "gradient_clipping",
    "max_grad_norm": "gradient_clipping",
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "dp": "parallel.data_parallel_size",
    "ep": "parallel.expert_model_parallel_size",
    "vpp": "parallel.virtual_pipeline_model_parallel_size",
    "noloco.k": "noloco.local_steps",
    "noloco.h": "noloco.local_steps",
    "inner_steps": "noloco.local_steps",
    "sync_every": "noloco.local_steps",
    "noloco.alpha": "noloco.outer_momentum",
    "noloco.beta": "noloco.outer_lr",
    "outer_learning_rate": "noloco.outer_lr",
    "noloco.gamma": "noloco.consensus_weight",
    "noloco.overlap": "noloco.overlap_steps",
    "moe_ffn_hidden_size": "model.ffn_hidden_size",
    "num_experts": "model.num_moe_experts",
    "num_local_experts": "model.num_moe_experts",
    "num_experts_per_tok": "model.moe_router_topk",
    "rope_theta": "model.rotary_base",
    "rms_norm_eps": "model.norm_epsilon",
    "max_steps": "training.train_iters",
    "pipeline": "parallel.pipeline_model_parallel_size",
    "tensor_parallel": "parallel.tensor_model_parallel_size",
    "expert_parallel": "parallel.expert_model_parallel_size",
    "sequence_parallel_size": "parallel.sequence_parallel",
    "activation_checkpointing": "model.recompute_granularity",
    "torch_autocast": "bf16.enabled",
    "amp": "bf16.enabled",
    "steps_per_print": "training.log_interval",
}
for _family in FAMILIES.values():
    ALIASES |= {theirs: f"model.{ours}" for ours, theirs in _family.hf_sizes.items() if theirs != ours}
# Where no field is the same, what to know instead.
HINTS = {
    "learning_rate": "the learning rate is optimizer.params.lr",
    "global_batch_size": "train_batch_size counts the samples of ONE replica; all replicas together take "
    "parallel.replicas times as many",
    "tie_word_embeddings": "model.untie_embeddings_and_output_weights says the opposite",
    "csv_monitor": "each replica has all its numbers in metrics.jsonl",
    "comet": "use wandb or tensorboard",
    "flops_profiler": "metrics.jsonl has speed/tflops_per_gpu",
    "wall_clock_breakdown": "metrics.jsonl has the time of each phase",
    "comms_logger": "metrics.jsonl has bytes and waits",
}
NOT_SUPPORTED = {
    "context_parallel_size": "a sequence stays whole but for parallel.sequence_parallel",
    "expert_tensor_parallel_size": "experts are cut by parallel.tensor_model_parallel_size, as other layers",
    "fp8": 'its scales would be reduced over all replicas; use "bf16": {"enabled": true}',
    "cuda_graph_impl": "a graph would freeze the routes",
    "enable_cuda_graph": "a graph would freeze the routes",
    "onebitadam": "it does not work with ZeRO; use AdamW, and noloco.payload for smaller exchanges",
    **dict.fromkeys(
        ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"),
        "the inner optimizer works where the model is; the outer one's weights are in host memory already "
        '(noloco.slow_weights "host")',
    ),
    "overlap_comm": "gradients are reduced once, after all microbatches",
    "compile": "the forward pass runs outside of DeepSpeed",
    **dict.fromkeys(("adadelta", "adamax", "nadam", "radam", "rmsprop"), "use AdamW"),
    **dict.fromkeys(("lrrangetest", "onecycle"), "use WSD"),
}
_NEAR = 0.8  # of difflib: that of a misspelling, and of no key of DeepSpeed that does nothing here


class ConfigError(ValueError):
    """What is wrong with a configuration: one line per problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)  # as pickle takes it from one process to another


@dataclass(frozen=True)
class Problem:
    """One line for the user, and the place in the file that it is sorted by."""

    path: Path
    text: str


def dotted(path: Iterable[str]) -> str:
    return ".".join(path)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`, `4 microbatches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def fields_of(model: type[BaseModel], path: Path = ()) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the definition of every field of a block, inner blocks included."""
    for name, field in model.model_fields.items():
        inner = _inner_model(field)
        if inner is not None:
            yield from fields_of(inner, (*path, name))
        else:
            yield dotted((*path, name)), field


def unknown_key(path: Path, known: Iterable[str], elsewhere: Iterable[str] = ()) -> Problem:
    """Return the line for a misspelt key, with the field that is probably meant.

    Args:
        known: the keys of the same block.
        elsewhere: dotted names of the fields of all blocks.
    """
    hint = _hint(path)
    if not hint:
        meant = _at_another_place(path[-1].lower(), elsewhere) or _nearest(path, known)
        hint = f"did you mean {meant}?" if meant else "leave it out"
    return Problem(path, f"{dotted(path)} is not a known key; {hint}")


def unknown_type(block: str, name: str, known: Iterable[str]) -> Problem:
    """Return the line for an optimizer or a schedule that is not among the `known`."""
    meant = _nearest((name,), known)
    hint = _hint((name,)) or (f"did you mean {meant}?" if meant else "known are " + ", ".join(known))
    return Problem((block, "type"), f"{block}.type: {shown(name)} is not a known {block}; {hint}")


def _hint(path: Path) -> str:
    """Return what there is to say of a name of other programs; "" if nothing is known of it."""
    for name in (dotted(path).lower(), path[-1].lower()):
        if name in ALIASES:
            return f"did you mean {ALIASES[name]}?"
        if name in NOT_SUPPORTED:
            return f"not supported: {NOT_SUPPORTED[name]}"
        if name in HINTS:
            return HINTS[name]
    return ""


def _nearest(path: Path, known: Iterable[str]) -> str:
    """Return the key in `known` that is nearest to the last name of a path, with the path; "" if none is."""
    spellings = {key.lower(): key for key in known}
    near = difflib.get_close_matches(path[-1].lower(), spellings, n=1, cutoff=_NEAR)
    return dotted((*path[:-1], spellings[near[0]])) if near else ""


def _at_another_place(name: str, elsewhere: Iterable[str]) -> str:
    """Return fields of this name, or with block and field read as one: eval_iters is evaluation.iters."""
    words = name.split("_")

    def is_meant(key: str) -> bool:
        if key.rpartition(".")[2] == name:
            return True
        theirs = key.replace(".", "_").split("_")
        return 1 < len(words) == len(theirs) and all(map(str.startswith, theirs, words))

    return " or ".join(list(filter(is_meant, elsewhere))[:2])


def shown(value: Any) -> str:
    """Return a value as the user wrote it, cut when long; text in quotes, so that 'ten' is seen to be text."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def expected_value(field: FieldInfo) -> str:
    """Return what a field accepts, from its annotation: `an integer >= 1 or "auto"`."""
    return _expected(field.annotation, field.metadata)


def _expected(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extras = get_args(annotation)
        inherited = [entry for extra in extras for entry in getattr(extra, "metadata", [extra])]
        return _expected(inner, [*inherited, *metadata])
    if origin is Literal:
        choices = [json.dumps(choice) for choice in get_args(annotation)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if origin is list:
        inner = " or ".join(map(_expected, get_args(annotation)))
        lengths = [entry.max_length for entry in metadata if isinstance(entry, annotated_types.MaxLen)]
        return f"a list of {lengths[0]}, each {inner}" if lengths else f"a list of {inner}"
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(option, metadata) for option in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        required = [name for name, field in annotation.model_fields.items() if field.is_required()]
        names = required or list(annotation.model_fields)
        return "an object with " + (", ".join(names) if len(names) <= 5 else f"{', '.join(names[:4])}, ...")
    kinds = {
        list: "a list",
        dict: "an object",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    bounds = " and ".join(filter(None, map(_bound, metadata)))
    return f"{kinds[origin or annotation]} {bounds}".rstrip()


def _bound(entry: Any) -> str:
    match entry:
        case annotated_types.Ge(ge=bound):
            return f">= {bound}"
        case annotated_types.Gt(gt=bound):
            return f"> {bound}"
        case annotated_types.Le(le=bound):
            return f"<= {bound}"
        case annotated_types.Lt(lt=bound):
            return f"< {bound}"
        case annotated_types.MultipleOf(multiple_of=divisor):
            return f"divisible by {divisor}"
        case annotated_types.MinLen():
            return "that is not empty"
    return ""


def problems_of(
    error: ValidationError, model: type[BaseModel], path: Path = (), elsewhere: Iterable[str] = ()
) -> list[Problem]:
    """Return pydantic's errors as our lines; the branches of a union give one line, not one each.

    Args:
        model: what was checked.
        path: where it lies in the file.
        elsewhere: dotted names of the fields of all blocks, one of which may be meant by an unknown key.
    """
    found: dict[tuple[Path, str], Problem] = {}
    for entry in error.errors(include_url=False):
        problem = _problem(entry, model, path, list(elsewhere))
        found.setdefault((problem.path, problem.text), problem)
    return list(found.values())


def _problem(entry: Any, model: type[BaseModel], path: Path, elsewhere: list[str]) -> Problem:
    owner: type[BaseModel] | None = model
    field = None
    for name in map(str, entry["loc"]):
        fields = owner.model_fields if owner is not None else {}
        if entry["type"] == "extra_forbidden" and name == str(entry["loc"][-1]) and owner is not None:
            return unknown_key((*path, name), owner.model_fields, elsewhere)
        if name not in fields:
            break  # the branch of a union: the field is what the user knows
        field, path = fields[name], (*path, name)
        owner = _inner_model(field)
    if entry["type"] in ("value_error", "assertion_error"):
        return Problem(path, f"{dotted(path)}: {entry['ctx']['error']}")
    assert field is not None  # `model` is checked against objects only
    if entry["type"] == "missing":
        meaning = f": {field.description}" if field.description else ""
        return Problem(path, f"{dotted(path)} is missing ({expected_value(field)}{meaning})")
    if entry["input"] == "auto":
        return Problem(path, f'{dotted(path)}: "auto" has no meaning here; give {expected_value(field)}')
    return Problem(path, f"{dotted(path)}: must be {expected_value(field)}, got {shown(entry['input'])}")


def _inner_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that holds one, which may be optional."""
    for annotation in (field.annotation, *get_args(field.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None
