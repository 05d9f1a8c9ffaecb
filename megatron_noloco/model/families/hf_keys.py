"""Read values of Hugging Face's `config.json`, and refuse those that no family here supports.

Every function raises ValueError, in one line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Keys = Mapping[str, Any]

# Constants of Megatron-core's `RotaryEmbedding._apply_scaling`, which Llama 3.1, 3.2 and 3.3 have.
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Defaults of transformers for YaRN, from the paper (Peng et al. 2023, arXiv 2309.00071).
YARN_DEFAULTS = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "attention_factor": None,  # 0.1 ln(factor) + 1
    "mscale": None,
    "mscale_all_dim": None,
}


def size(theirs: Keys, key: str, default: int | None = None) -> int:
    """Return a positive whole number; null counts as absent."""
    value = _value(theirs, key, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}; it must be a whole number >= 1")
    return value


def number(theirs: Keys, key: str, default: float | None = None) -> float:
    """Return a number > 0; null counts as absent."""
    value = _value(theirs, key, default)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{key} is {value!r}; it must be a number > 0")
    return float(value)


def _value(theirs: Keys, key: str, default: float | None) -> Any:
    value = default if theirs.get(key) is None else theirs[key]
    if value is None:
        raise ValueError(f"{key} is missing")
    return value


def refuse_flags(theirs: Keys, keys: Sequence[str], reason: str) -> None:
    """Refuse a model in which one of these keys is set, for this reason."""
    for key in keys:
        if theirs.get(key):
            raise ValueError(f"{key} is {theirs[key]!r}; {reason}")


def refuse_layer_types(theirs: Keys, only: str) -> None:
    """Refuse a model unless all of its `layer_types`, the attention of each layer, are `only`."""
    types = theirs.get("layer_types") or []
    if not isinstance(types, list):
        raise ValueError(f"layer_types is {types!r}; it must be a list of text")
    others = sorted({str(layer_type) for layer_type in types} - {only})
    if others:
        raise ValueError(f'layer_types has "{others[0]}"; all layers must be "{only}" in this model')


# Rotary embeddings


def rotary(theirs: Keys) -> Keys:
    """Return the parameters of the rotary embeddings, with `rope_type` and `rope_theta` filled in.

    transformers 5 writes them as `rope_parameters`; earlier versions write `rope_scaling`, and the base as a key
    of its own. If a file has both, every version reads `rope_scaling`, and the base from the file if it has none.
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


def scaling(theirs: Keys, rope_types: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `Architecture` for scaled rotary frequencies; empty if they are not scaled.

    Refuses a type of scaling that is not in `rope_types`.
    """
    rope = rotary(theirs)
    rope_type = rope["rope_type"]
    if rope_type == "default":
        return {}
    if rope_type not in rope_types:
        known = " and ".join(f'"{name}"' for name in rope_types)
        raise ValueError(f"rope_scaling is of type {rope_type!r}; this family has only {known}")
    # The context before it was extended, from the same keys and in the same order as in transformers.
    longest = rope.get("original_max_position_embeddings", theirs.get("max_position_embeddings"))
    before = theirs.get("original_max_position_embeddings", longest)
    return _SCALINGS[rope_type]({**rope, "original_max_position_embeddings": before})


def _llama3(rope: Keys) -> dict[str, Any]:
    for key, value in LLAMA3_SCALING.items():
        if rope.get(key) != value:
            raise ValueError(
                f"rope_scaling has {key} {rope.get(key)!r}; Megatron-core computes {value:g} only"
            )
    return {"rope_scaling_factor": number(rope, "factor")}


def _yarn(rope: Keys) -> dict[str, Any]:
    for key, value in YARN_DEFAULTS.items():
        if rope.get(key) not in (None, value):
            known = "left out" if value is None else f"{value!r}"
            raise ValueError(f"rope_scaling has {key} {rope[key]!r}; it must be {known} with YaRN")
    return {
        "yarn_rotary_scaling_factor": number(rope, "factor"),
        "yarn_original_max_position_embeddings": size(rope, "original_max_position_embeddings"),
    }


_SCALINGS = {"llama3": _llama3, "yarn": _yarn}
