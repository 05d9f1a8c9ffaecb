"""Reading Hugging Face's `config.json`: values checked, and what no family of ours computes is refused.

Every function raises ValueError, in one line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Keys = Mapping[str, Any]

# Megatron-core fixes these in `RotaryEmbedding._apply_scaling`; they are those of Llama 3.1, 3.2 and 3.3.
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def size(theirs: Keys, key: str, default: int | None = None) -> int:
    """A positive whole number; null counts as absent."""
    value = theirs.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{key} is missing")
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}; it must be a whole number >= 1")
    return value


def number(theirs: Keys, key: str, default: float | None = None) -> float:
    """A number > 0; null counts as absent."""
    value = theirs.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{key} is missing")
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{key} is {value!r}; it must be a number > 0")
    return float(value)


def refuse_flags(theirs: Keys, keys: Sequence[str], reason: str) -> None:
    """For keys that are true in a model that is not ours."""
    for key in keys:
        if theirs.get(key):
            raise ValueError(f"{key} is {theirs[key]!r}; {reason}")


def refuse_layer_types(theirs: Keys, only: str) -> None:
    """`layer_types` names the attention of each layer; ours is `only` that one."""
    others = sorted({str(kind) for kind in theirs.get("layer_types") or ()} - {only})
    if others:
        raise ValueError(f'layer_types has "{others[0]}"; all layers must be "{only}" in this model')


# Rotary embeddings


def rotary(theirs: Keys) -> Keys:
    """The parameters of the rotary embeddings, `rope_type` and `rope_theta` filled in.

    transformers 5 has them in `rope_parameters`; before, `rope_scaling` had all but the base. Where a file has
    both, every version takes `rope_scaling`, and `rope_theta` of the file where that has none.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(theirs.get(key) or {}, Mapping):
            raise ValueError(f"{key} is {theirs[key]!r}; it must be an object")
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f'rope_parameters has its own for "{nested[0]}"; all layers must have the same')
    partial = rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor is {partial!r}; heads must be rotated whole")
    return {
        **rope,
        "rope_type": rope.get("rope_type") or rope.get("type") or "default",
        "rope_theta": number(rope, "rope_theta", number(theirs, "rope_theta", 10000.0)),
    }


def refuse_scaling(theirs: Keys) -> None:
    """For families without scaled rotary embeddings."""
    kind = rotary(theirs)["rope_type"]
    if kind != "default":
        raise ValueError(
            f"rope_scaling is of type {kind!r}; scaled rotary embeddings are not supported in this family"
        )


def llama3_factor(theirs: Keys) -> float | None:
    """By how much rotary frequencies are scaled as in Llama 3.1; None: they are not scaled."""
    rope = rotary(theirs)
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        raise ValueError(f'rope_scaling is of type {rope["rope_type"]!r}; only "llama3" is supported')
    # A model's context before it was extended; transformers looks for it in these places, in this order.
    longest = rope.get("original_max_position_embeddings", theirs.get("max_position_embeddings"))
    given = {
        **rope,
        "original_max_position_embeddings": theirs.get("original_max_position_embeddings", longest),
    }
    for key, value in LLAMA3_SCALING.items():
        if given.get(key) != value:
            raise ValueError(
                f"rope_scaling has {key} {given.get(key)!r}; Megatron-core 0.16.1 computes {value:g} only"
            )
    return number(given, "factor")
