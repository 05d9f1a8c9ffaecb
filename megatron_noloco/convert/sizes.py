"""Chooses the family and the sizes of a model from what other programs say of it."""

from pathlib import Path

from megatron_noloco.config.programs import Facts, titan_model
from megatron_noloco.convert.draft import Draft
from megatron_noloco.model.families import families_with


def settle_model(draft: Draft) -> None:
    """Put the fields of the block `model` that facts decide."""
    facts = draft.facts
    if facts.titan_model or facts.titan_flavor:
        _titan_sizes(draft)
    if facts.model_folder:
        _sizes_of_folder(draft, Path(facts.model_folder))
    if "model.num_layers" in draft.fields and "model.family" not in draft.fields:
        _family(draft)
        _sizes(draft)
    if draft.get("model.recompute_granularity") == "full":
        draft.put("model.recompute_method", draft.get("model.recompute_method", "uniform"))
        draft.put("model.recompute_num_layers", draft.get("model.recompute_num_layers", 1))
    else:
        for name in ("recompute_method", "recompute_num_layers"):
            draft.drop(f"model.{name}", "it has a meaning only with recompute_granularity full")


def _titan_sizes(draft: Draft) -> None:
    name, flavor = draft.facts.titan_model or "llama3", draft.facts.titan_flavor or "debugmodel"
    sizes = titan_model(name, flavor)
    if sizes is None:
        for field in ("facts.titan_model", "facts.titan_flavor"):
            draft.advise(field, "its sizes are not known here: give them with --config, or import a folder")
        return
    for field, value in sizes.items():
        draft.put(f"model.{field}", value, "titan_model", "titan_flavor")


def _sizes_of_folder(draft: Draft, folder: Path) -> None:
    """Put the sizes of a Hugging Face model, which the run then starts from."""
    if not (folder / "config.json").exists():
        download = f"download it (hf download {folder} --local-dir FOLDER)"
        draft.advise("facts.model_folder", f"{download}, then megatron-noloco import FOLDER --config THIS")
        return
    from megatron_noloco.data.auto_tokenizer import has_tokenizer
    from megatron_noloco.huggingface.folder import ModelFolder, model_fields

    for name, value in model_fields(ModelFolder(folder).architecture).items():
        if value is not None:
            draft.put(f"model.{name}", value, "model_folder")
    draft.put("training.pretrained", str(folder), "model_folder")
    if has_tokenizer(folder):
        draft.put("data.tokenizer_model", str(folder), "model_folder")


def _family(draft: Draft) -> None:
    """Choose the family that is most like the model, and say what is different in it."""
    facts = draft.facts
    family = _most_like(facts, draft.get("model.num_moe_experts"), draft.get("model.sliding_window"))
    names = ("activation", "normalization", "biases", "qkv_biases", "qk_norm", "position")
    draft.put("model.family", family, *names)
    of_llamas = family != "starcoder2"
    activation, normalization = ("swiglu", "RMSNorm") if of_llamas else ("gelu", "LayerNorm")
    biases = "no biases" if of_llamas else "biases on its linear layers"
    differences = {
        "position": facts.position != "rope" and "rotary embeddings",
        "activation": (facts.activation or "gelu") != activation and activation,
        "normalization": facts.normalization != normalization and normalization,
        "biases": (facts.biases is not False) == of_llamas and biases,
        "qkv_biases": facts.qkv_biases and family != "qwen2" and "other biases",
        "qk_norm": facts.qk_norm and not family.startswith("qwen3") and "no norms on queries and keys",
    }
    for name, instead in differences.items():
        if instead:
            draft.advise(f"facts.{name}", f'the model becomes another: the family "{family}" has {instead}')


def _most_like(facts: Facts, experts: int | None, window: int | None) -> str:
    if experts:
        return "qwen3_moe" if facts.qk_norm else "mixtral"
    if facts.qk_norm:
        return "qwen3"
    if facts.qkv_biases:
        return "qwen2"
    if facts.activation == "swiglu" or facts.normalization == "RMSNorm":
        return "mistral" if window else "llama"
    return "starcoder2"


def _sizes(draft: Draft) -> None:
    facts, hidden = draft.facts, draft.get("model.hidden_size")
    if facts.expert_ffn_hidden_size:
        draft.replace("model.ffn_hidden_size", facts.expert_ffn_hidden_size, "expert_ffn_hidden_size")
    elif "model.ffn_hidden_size" not in draft.fields and isinstance(hidden, int):
        gated = int(4 * hidden * 2 / 3 / 64) * 64  # as Megatron-LM does
        draft.put("model.ffn_hidden_size", gated if facts.activation == "swiglu" else 4 * hidden)
    multiple, tp = "model.make_vocab_size_divisible_by", draft.get("parallel.tensor_model_parallel_size", 1)
    if isinstance(draft.get(multiple), int) and isinstance(tp, int):
        draft.replace(multiple, draft.get(multiple) * tp)  # Megatron-LM pads to a multiple for each rank
    if facts.grouped:
        draft.put("model.num_query_groups", draft.get("model.num_query_groups", 1), "grouped")
    if facts.rope_scaling:
        draft.put("model.rope_scaling_factor", draft.get("model.rope_scaling_factor", 8.0), "rope_scaling")
    else:
        draft.drop("model.rope_scaling_factor", "it has a meaning only with use_rope_scaling")
    family = draft.get("model.family")
    for field in [name for name in draft.fields if name.startswith("model.")]:
        name = field.removeprefix("model.")
        if families_with(name) and family not in families_with(name):
            if not name.startswith("moe_"):
                draft.advise(field, f'the model becomes another: the family "{family}" has none')
            draft.drop(field, "the model has no experts")
