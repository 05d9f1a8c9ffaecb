"""The base class of model families.

All families here are like Llama: a norm before attention and before an MLP, rotary embeddings, grouped queries.
All but StarCoder2 have RMSNorm and SwiGLU. `Family` defines what they share, a subclass what is different.

Megatron-core and Hugging Face rotate the same pairs of channels (i and i + head / 2), so rotary embeddings need no
permutation of the rows of queries and keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from megatron_noloco.errors import UserError
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families.table import Parameter, Rows

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # Hugging Face's names
OURS, THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."

# Numbers of scaled rotary embeddings that only have these values here, by Hugging Face's type. Of `llama3` (Llama
# 3.1, 3.2 and 3.3) they are constants of Megatron-core's `RotaryEmbedding._apply_scaling`; of `yarn` the defaults
# of transformers, from the paper (Peng et al. 2023, arXiv 2309.00071).
ROPE_CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": None,  # 0.1 ln(factor) + 1
        "mscale": None,
        "mscale_all_dim": None,
    },
}


class Family:
    """A model family: its parameters, its options for Megatron-core, and Hugging Face's config."""

    name: ClassVar[str]  # also Hugging Face's `model_type`
    # Fields of `Architecture` and `Compute` that only some families have, this one among them: name and default
    own_fields: ClassVar[Mapping[str, Any]] = {}
    normalization: ClassVar[Literal["RMSNorm", "LayerNorm"]] = "RMSNorm"
    hf_class: ClassVar[str]  # the class in transformers
    hf_fixed: ClassVar[
        Mapping[str, Any]
    ] = {}  # keys of Hugging Face's config that have only these values here
    hf_activation: ClassVar[str] = "silu"  # the only `hidden_act` of this family
    hf_norm_epsilon: ClassVar[str] = "rms_norm_eps"  # Hugging Face's key
    # Hugging Face's keys of dropout probabilities, and the fields that they are; of several keys of one field the
    # last is imported, all are exported
    hf_dropouts: ClassVar[Mapping[str, str]] = {"attention_dropout": "attention_dropout"}
    rope_types: ClassVar[Sequence[str]] = ("yarn",)  # Hugging Face's types of scaled rotary embeddings
    hf_sizes: ClassVar[Mapping[str, str]] = {  # sizes of an `Architecture`, and Hugging Face's keys for them
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "num_query_groups": "num_key_value_heads",
        "kv_channels": "head_dim",
        "seq_length": "max_position_embeddings",
        "vocab_size": "vocab_size",
    }
    # Hugging Face's names of gate, up and down in an MLP; without a gate of up and down
    hf_mlp: ClassVar[Sequence[str]] = ("gate_proj", "up_proj", "down_proj")

    # Parameters

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return len(self.hf_mlp) == 3

    def rows(self, architecture: Architecture) -> Sequence[Parameter]:
        """Return the rows of the table in the order of the model; rows of layers are adjacent."""
        a = architecture
        # The padding, absent in Hugging Face's tensors, lets the embedding divide into tensor-parallel slices.
        vocabulary = Rows((a.vocab_size, a.padded_vocab_size - a.vocab_size))
        embedding = Parameter(
            "embedding.word_embeddings.weight",
            (a.padded_vocab_size, a.hidden_size),
            tp_dim=0,
            hf=(EMBEDDING,),
            rows=vocabulary,
        )
        output = Parameter(
            "output_layer.weight",
            (a.padded_vocab_size, a.hidden_size),
            tp_dim=0,
            hf=() if a.tied_embeddings else (HEAD,),
            rows=vocabulary,
            same_as=embedding.name if a.tied_embeddings else None,
        )
        final_norm = Parameter(
            "decoder.final_layernorm.weight", (a.hidden_size,), init="ones", hf=("model.norm.weight",)
        )
        return (embedding, *self.attention_rows(a), *self.mlp_rows(a), final_norm, output)

    def attention_rows(self, architecture: Architecture) -> Sequence[Parameter]:
        """Return the rows of a layer's first norm and its attention."""
        a = architecture
        hidden, head = a.hidden_size, a.kv_channels
        heads_per_group = a.num_attention_heads // a.num_query_groups
        # For each key/value group its queries, key and value, so that a slice of whole groups is contiguous. The
        # parameter is [groups * (heads_per_group + 2) * head, hidden]; Hugging Face's q is [heads * head, hidden],
        # k and v are [groups * head, hidden].
        qkv = Rows((heads_per_group * head, head, head), repeats=a.num_query_groups)
        return (
            Parameter(
                OURS + "input_layernorm.weight",
                (hidden,),
                init="ones",
                hf=(THEIRS + "input_layernorm.weight",),
                fused_name=OURS + "self_attention.linear_qkv.layer_norm_weight",
            ),
            Parameter(
                OURS + "self_attention.linear_qkv.weight",
                (a.num_query_groups * sum(qkv.sizes), hidden),
                tp_dim=0,
                hf=tuple(THEIRS + f"self_attn.{part}_proj.weight" for part in "qkv"),
                rows=qkv,
                linear=True,
            ),
            Parameter(
                OURS + "self_attention.linear_proj.weight",
                (hidden, a.num_attention_heads * head),
                init="residual",
                tp_dim=1,
                hf=(THEIRS + "self_attn.o_proj.weight",),
                linear=True,
            ),
        )

    def mlp_rows(self, architecture: Architecture) -> Sequence[Parameter]:
        """Return the rows of a layer's second norm and its MLP."""
        norm = Parameter(
            OURS + "pre_mlp_layernorm.weight",
            (architecture.hidden_size,),
            init="ones",
            hf=(THEIRS + "post_attention_layernorm.weight",),
            fused_name=OURS + "mlp.linear_fc1.layer_norm_weight",
        )
        names = [THEIRS + f"mlp.{name}.weight" for name in self.hf_mlp]
        return (norm, *mlp_matrices(architecture, OURS + "mlp.", names))

    # Megatron-core

    def core_config(self, architecture: Architecture) -> dict[str, Any]:
        """Return fields of Megatron-core's TransformerConfig, without the sizes, which all families share."""
        import torch.nn.functional as F

        return {
            "normalization": self.normalization,
            "gated_linear_unit": self.gated,
            "activation_func": F.silu,
            "add_bias_linear": False,
        }

    def core_model(self, architecture: Architecture) -> dict[str, Any]:
        """Return arguments of Megatron-core's GPTModel that depend on the family."""
        yarn = architecture.yarn_rotary_scaling_factor is not None
        return {
            "position_embedding_type": "yarn" if yarn else "rope",
            "rotary_base": architecture.rotary_base,
        }

    # Hugging Face

    def hf_config(self, architecture: Architecture, dtype: str) -> dict[str, Any]:
        """Return the content of Hugging Face's `config.json`, without the ids of BOS and EOS."""
        a = architecture
        return {
            "architectures": [self.hf_class],
            "model_type": self.name,
            **{theirs: getattr(a, ours) for ours, theirs in self.hf_sizes.items()},
            "hidden_act": self.hf_activation,
            self.hf_norm_epsilon: a.norm_epsilon,
            "rope_parameters": {**self.hf_rope(a), "rope_theta": a.rotary_base},
            "tie_word_embeddings": a.tied_embeddings,
            "initializer_range": a.init_method_std,
            "dtype": dtype,
            **self.own_keys(a),
        }

    def own_keys(self, architecture: Architecture) -> dict[str, Any]:
        """Return the keys of Hugging Face's config that only this family has."""
        return dict(self.hf_fixed)

    def hf_rope(self, architecture: Architecture) -> dict[str, Any]:
        """Return how rotary embeddings are scaled, with Hugging Face's keys."""
        a = architecture
        if a.yarn_rotary_scaling_factor is None:
            return {"rope_type": "default"}
        return {
            "rope_type": "yarn",
            "factor": a.yarn_rotary_scaling_factor,
            "original_max_position_embeddings": a.yarn_original_max_position_embeddings,
        }

    def architecture(self, config: Any) -> Architecture:
        """Return the architecture that a config of transformers describes, without padding of the vocabulary.

        The inverse of `hf_config`. Refused is what the logits of a short text may not show. Raises UserError, in
        one line.
        """
        fixed = {"hidden_act": self.hf_activation, "quantization_config": None, "auto_map": None}
        for key, value in (fixed | dict(self.hf_fixed)).items():
            if (found := getattr(config, key, value)) != value:
                must = "absent" if value is None else repr(value)
                raise UserError(f"{key} is {found!r}; in {self.name} it must be {must}")
        rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        rope_type = rope.get("rope_type")
        if rope_type not in ("default", *self.rope_types):
            known = " and ".join(f'"{name}"' for name in self.rope_types)
            raise UserError(f"rope_parameters are of type {rope_type!r}; this family has only {known}")
        for key, value in {"partial_rotary_factor": 1.0, **ROPE_CONSTANTS[rope_type]}.items():
            if rope.get(key) not in (None, value):
                must = "absent" if value is None else repr(value)
                raise UserError(
                    f"{key} of rope_parameters is {rope[key]!r}; with {rope_type} it must be {must}"
                )
        sizes: dict[str, Any] = {ours: getattr(config, key, None) for ours, key in self.hf_sizes.items()}
        sizes["kv_channels"] = sizes["kv_channels"] or config.hidden_size // config.num_attention_heads
        own = self.own_values(config)
        if rope_type == "yarn":
            own["yarn_rotary_scaling_factor"] = rope.get("factor")
            own["yarn_original_max_position_embeddings"] = rope.get("original_max_position_embeddings")
        elif rope_type == "llama3":
            own["rope_scaling_factor"] = rope.get("factor")
        return Architecture(
            family=self.name,
            **sizes,
            padded_vocab_size=config.vocab_size,
            rotary_base=rope["rope_theta"],
            norm_epsilon=getattr(config, self.hf_norm_epsilon),
            tied_embeddings=config.tie_word_embeddings,
            init_method_std=config.initializer_range,
            **own,
        )

    def own_values(self, config: Any) -> dict[str, Any]:
        """Return the values of `own_fields` from a config of transformers: the inverse of `own_keys`.

        Raises UserError, in one line, for a model that cannot be built here.
        """
        return {}


def mlp_matrices(architecture: Architecture, ours: str, theirs: Sequence[str]) -> Sequence[Parameter]:
    """Return the rows of the two matrices of an MLP.

    Args:
        ours: prefix of both names.
        theirs: Hugging Face's names of gate, up and down, or without a gate of up and down.
    """
    hidden, ffn = architecture.hidden_size, architecture.ffn_hidden_size
    *inward, down = theirs
    return (
        # Gate and up are stacked, [2 * ffn, hidden]; a tensor-parallel slice has its part of each.
        Parameter(
            ours + "linear_fc1.weight",
            (len(inward) * ffn, hidden),
            tp_dim=0,
            hf=tuple(inward),
            rows=Rows((ffn,) * len(inward), cut_each=True),
            linear=True,
        ),
        Parameter(
            ours + "linear_fc2.weight", (hidden, ffn), init="residual", tp_dim=1, hf=(down,), linear=True
        ),
    )
