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
from megatron_noloco.model.families import hf_keys
from megatron_noloco.model.families.table import Parameter, Rows, Stored

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # Hugging Face's names
OURS, THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."


class Family:
    """A model family: its parameters, its options for Megatron-core, and Hugging Face's config."""

    name: ClassVar[str]  # also Hugging Face's `model_type`
    # Fields of `Architecture` and `Compute` that only some families have, this one among them: name and default
    own_fields: ClassVar[Mapping[str, Any]] = {}
    normalization: ClassVar[Literal["RMSNorm", "LayerNorm"]] = "RMSNorm"
    hf_class: ClassVar[str]  # the class in transformers
    hf_defaults: ClassVar[Mapping[str, Any]] = {}  # of transformers, for keys that a config.json lacks
    hf_fixed: ClassVar[Mapping[str, Any]] = {}  # keys of a config.json that have only these values here
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
    # Parts of the names of Hugging Face's tensors, and their names in transformers 5
    hf_renamed: ClassVar[Mapping[str, str]] = {}

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
        a, scaling = architecture, self.hf_scaling(architecture)
        return {
            "architectures": [self.hf_class],
            "model_type": self.name,
            **{theirs: getattr(a, ours) for ours, theirs in self.hf_sizes.items()},
            "hidden_act": self.hf_activation,
            self.hf_norm_epsilon: a.norm_epsilon,
            # The first two keys before transformers 5; since then the third.
            "rope_theta": a.rotary_base,
            **({"rope_scaling": scaling} if scaling else {}),
            "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": a.rotary_base},
            "tie_word_embeddings": a.tied_embeddings,
            "initializer_range": a.init_method_std,
            "dtype": dtype,
            "torch_dtype": dtype,  # the name before transformers 4.56
            **self.own_keys(architecture),
        }

    def own_keys(self, architecture: Architecture) -> dict[str, Any]:
        """Return the keys of Hugging Face's config that only this family has."""
        return dict(self.hf_fixed)

    def hf_stacks(self, architecture: Architecture) -> dict[str, Stored]:
        """Return by name the tensors in which transformers 5 stacks several of a layer's (`{layer}` in names)."""
        return {}

    def hf_scaling(self, architecture: Architecture) -> dict[str, Any]:
        """Return the keys of Hugging Face's config for scaled rotary embeddings; empty if they are not scaled."""
        a = architecture
        if a.yarn_rotary_scaling_factor is None:
            return {}
        return {
            "rope_type": "yarn",
            "factor": a.yarn_rotary_scaling_factor,
            "original_max_position_embeddings": a.yarn_original_max_position_embeddings,
        }

    def architecture(self, hf_config: Mapping[str, Any]) -> Architecture:
        """Return the architecture that a `config.json` describes, without padding of the vocabulary.

        The inverse of `hf_config`. Raises UserError, in one line, for a model that is not supported.
        """
        theirs = {**self.hf_defaults, **hf_config}
        for key, value in {"hidden_act": self.hf_activation, **self.hf_fixed}.items():
            given = self.hf_defaults.get(key, value) if hf_config.get(key) is None else hf_config[key]
            if given != value:
                raise UserError(f"{key} is {given!r}; in {self.name} only {value!r} is supported")
        hf_keys.refuse_other_models(theirs, self.hf_class)
        hf_keys.refuse_two_rotations(hf_config)
        own = self.own_values(theirs)
        heads, hidden = (hf_keys.size(theirs, key) for key in ("num_attention_heads", "hidden_size"))
        defaults = {"num_query_groups": heads, "kv_channels": hidden // heads}
        sizes = {ours: hf_keys.size(theirs, key, defaults.get(ours)) for ours, key in self.hf_sizes.items()}
        return Architecture(
            family=self.name,
            **sizes,
            padded_vocab_size=sizes["vocab_size"],
            rotary_base=hf_keys.rotary(theirs)["rope_theta"],
            norm_epsilon=hf_keys.number(theirs, self.hf_norm_epsilon, 1e-6),
            tied_embeddings=hf_keys.flag(theirs, "tie_word_embeddings"),
            init_method_std=hf_keys.number(theirs, "initializer_range", 0.02),
            **hf_keys.scaling(theirs, self.rope_types),
            **own,
        )

    def own_values(self, theirs: hf_keys.Keys) -> dict[str, Any]:
        """Return the values of `own_fields` from Hugging Face's config, whose missing keys have their defaults.

        The inverse of `own_keys`. Raises UserError, in one line, for keys of a model that cannot be built here.
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
