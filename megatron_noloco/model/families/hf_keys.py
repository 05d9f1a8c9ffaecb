"""Read values of Hugging Face's `config.json`, and refuse those that no family here supports.

Every function raises UserError, in one line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_noloco.errors import UserError

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
        raise UserError(f"{key} is {value!r}; it must be a whole number >= 1")
    return value


def number(theirs: Keys, key: str, default: float | None = None) -> float:
    """Return a number > 0; null counts as absent."""
    value = _value(theirs, key, default)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise UserError(f"{key} is {value!r}; it must be a number > 0")
    return float(value)


def flag(theirs: Keys, key: str, default: bool = False) -> bool:
    """Return true or false; null counts as absent."""
    value = default if theirs.get(key) is None else theirs[key]
    if type(value) is not bool:
        raise UserError(f"{key} is {value!r}; it must be true or false")
    return value


def _value(theirs: Keys, key: str, default: float | None) -> Any:
    value = default if theirs.get(key) is None else theirs[key]
    if value is None:
        raise UserError(f"{key} is missing")
    return value


def refuse_flags(theirs: Keys, keys: Sequence[str], reason: str) -> None:
    """Refuse a model in which one of these keys is set, for this reason."""
    for key in keys:
        if theirs.get(key):
            raise UserError(f"{key} is {theirs[key]!r}; {reason}")


def refuse_other_models(theirs: Keys, hf_class: str) -> None:
    """Refuse keys with which another model than that of transformers' class is computed, or other weights."""
    if "AutoModelForCausalLM" in str(theirs.get("auto_map")):
        raise UserError(
            "auto_map names Python code of the model's own, which is not run; remove it if the model is a "
            f"{hf_class} of transformers"
        )
    refuse_flags(theirs, ("quantization_config", "compression_config"), "weights must not be quantized")
    refuse_flags(theirs, ("pruned_heads",), "all layers must have all heads")
    refuse_flags(theirs, ("transformers_weights",), "weights are read from model*.safetensors")
    if not flag(theirs, "is_causal", default=True):
        raise UserError("is_causal is false; a token must attend to those before it only")


def refuse_layer_types(theirs: Keys, only: str) -> None:
    """Refuse a model unless all of its `layer_types`, the attention of each layer, are `only`."""
    types = theirs.get("layer_types") or []
    if not isinstance(types, list):
        raise UserError(f"layer_types is {types!r}; it must be a list of text")
    others = sorted({str(layer_type) for layer_type in types} - {only})
    if others:
        raise UserError(f'layer_types has "{others[0]}"; all layers must be "{only}" in this model')


# Rotary embeddings


def refuse_two_rotations(theirs: Keys) -> None:
    """Refuse a file that describes the rotary embeddings twice, and differently; `theirs` has no defaults.

    Beside `rope_scaling` no version of transformers reads `rope_parameters`. Without `rope_scaling` version 4
    reads `rope_theta`, and version 5 prefers that of `rope_parameters`.
    """
    scaling, parameters = (theirs.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    for key, rope in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if not isinstance(rope, Mapping):
            raise UserError(f"{key} is {rope!r}; it must be an object")
    places = {"": theirs, "of rope_scaling ": scaling, "of rope_parameters ": parameters}
    bases = {
        where: keys["rope_theta"] for where, keys in places.items() if keys.get("rope_theta") is not None
    }
    if any(base != next(iter(bases.values())) for base in bases.values()):
        said = " and ".join(f"rope_theta {where}is {base!r}" for where, base in bases.items())
        raise UserError(f"{said}; they must be the same")
    if not scaling or not parameters:
        return
    if list(bases) == ["of rope_parameters "]:
        raise UserError(
            "rope_theta of rope_parameters is not read beside rope_scaling; give rope_theta as a key of its own"
        )
    ours, others = ({**rope, "rope_type": _rope_type(rope)} for rope in (scaling, parameters))
    if others["rope_type"] != "default":
        different = [key for key in ours.keys() & others.keys() if ours[key] != others[key]]
        if different:
            key = min(different)
            raise UserError(
                f"{key} of rope_scaling is {ours[key]!r} and of rope_parameters {others[key]!r}; "
                "they must be the same"
            )


def rotary(theirs: Keys) -> Keys:
    """Return the parameters of the rotary embeddings, with `rope_type` and `rope_theta` filled in.

    transformers 5 writes them as `rope_parameters`; earlier versions write `rope_scaling`, and the base as a key
    of its own. A file may have both, see `refuse_two_rotations`.
    """
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise UserError(f'rope_parameters has its own for "{nested[0]}"; all layers must have the same')
    partial = rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UserError(f"partial_rotary_factor is {partial!r}; heads must be rotated whole")
    return {
        **rope,
        "rope_type": _rope_type(rope),
        "rope_theta": number(rope, "rope_theta", number(theirs, "rope_theta", 10000.0)),
    }


def _rope_type(rope: Keys) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


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
        raise UserError(f"rope_scaling is of type {rope_type!r}; this family has only {known}")
    # The context before it was extended, from the same keys and in the same order as in transformers.
    longest = rope.get("original_max_position_embeddings", theirs.get("max_position_embeddings"))
    before = theirs.get("original_max_position_embeddings", longest)
    return _SCALINGS[rope_type]({**rope, "original_max_position_embeddings": before})


def _llama3(rope: Keys) -> dict[str, Any]:
    for key, value in LLAMA3_SCALING.items():
        if rope.get(key) != value:
            raise UserError(
                f"rope_scaling has {key} {rope.get(key)!r}; Megatron-core computes {value:g} only"
            )
    return {"rope_scaling_factor": number(rope, "factor")}


def _yarn(rope: Keys) -> dict[str, Any]:
    for key, value in YARN_DEFAULTS.items():
        if rope.get(key) not in (None, value):
            known = "left out" if value is None else f"{value!r}"
            raise UserError(f"rope_scaling has {key} {rope[key]!r}; it must be {known} with YaRN")
    return {
        "yarn_rotary_scaling_factor": number(rope, "factor"),
        "yarn_original_max_position_embeddings": size(rope, "original_max_position_embeddings"),
    }


_SCALINGS = {"llama3": _llama3, "yarn": _yarn}
