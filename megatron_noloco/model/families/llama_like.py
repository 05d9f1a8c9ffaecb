"""What Llama and its descendants share: RMSNorm before attention and before a SwiGLU MLP, rotary embeddings,
grouped queries.

Megatron-core and Hugging Face rotate the same pairs of channels (i and i + head / 2), so rotary embeddings need no
permutation of the rows of queries and keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import hf_keys
from megatron_noloco.model.families.family import Family, MegatronOptions
from megatron_noloco.model.families.table import Parameter, Rows

OURS, THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."


class LlamaLike(Family):
    """Llama itself, but for what its descendants change: rows of a layer, and keys of Hugging Face's config."""

    hf_class: ClassVar[str]  # the class in transformers
    rope_types: ClassVar[Sequence[str]] = ("yarn",)  # Hugging Face's types of scaled rotary embeddings
    hf_defaults: ClassVar[Mapping[str, Any]] = {}  # what transformers takes for keys that a config.json lacks

    def rows(self, architecture: Architecture) -> Sequence[Parameter]:
        a = architecture
        # Rows beyond the vocabulary exist here alone, so that the embedding divides into tensor-parallel slices.
        vocabulary = Rows((a.vocab_size, a.padded_vocab_size - a.vocab_size))
        embedding = Parameter(
            "embedding.word_embeddings.weight",
            (a.padded_vocab_size, a.hidden_size),
            tp_dim=0,
            hf=("model.embed_tokens.weight",),
            rows=vocabulary,
        )
        output = Parameter(
            "output_layer.weight",
            (a.padded_vocab_size, a.hidden_size),
            tp_dim=0,
            hf=() if a.tied_embeddings else ("lm_head.weight",),
            rows=vocabulary,
            same_as=embedding.name if a.tied_embeddings else None,
        )
        final_norm = Parameter(
            "decoder.final_layernorm.weight", (a.hidden_size,), init="ones", hf=("model.norm.weight",)
        )
        return (embedding, *self.attention_rows(a), *self.mlp_rows(a), final_norm, output)

    def attention_rows(self, architecture: Architecture) -> Sequence[Parameter]:
        """Of a layer: its first norm and its attention."""
        a = architecture
        hidden, head = a.hidden_size, a.kv_channels
        heads_per_group = a.num_attention_heads // a.num_query_groups
        # For each key/value group its queries, its key, its value: a slice of whole groups is then contiguous.
        # Ours is [groups * (heads_per_group + 2) * head, hidden], q [heads * head, hidden], k and v
        # [groups * head, hidden].
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
        """Of a layer: its second norm and its MLP."""
        norm = Parameter(
            OURS + "pre_mlp_layernorm.weight",
            (architecture.hidden_size,),
            init="ones",
            hf=(THEIRS + "post_attention_layernorm.weight",),
            fused_name=OURS + "mlp.linear_fc1.layer_norm_weight",
        )
        names = tuple(THEIRS + f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        return (norm, *gated_mlp(architecture, OURS + "mlp.", names))

    def megatron_options(self, architecture: Architecture) -> MegatronOptions:
        import torch.nn.functional as F

        a = architecture
        yarn = a.yarn_rotary_scaling_factor is not None
        return MegatronOptions(
            config={
                "normalization": "RMSNorm",
                "gated_linear_unit": True,
                "activation_func": F.silu,
                "add_bias_linear": False,
            },
            model={"position_embedding_type": "yarn" if yarn else "rope", "rotary_base": a.rotary_base},
            attributes={
                "yarn_rotary_scaling_factor": a.yarn_rotary_scaling_factor,
                "yarn_original_max_position_embeddings": a.yarn_original_max_position_embeddings,
                "yarn_beta_fast": hf_keys.YARN_DEFAULTS["beta_fast"],
                "yarn_beta_slow": hf_keys.YARN_DEFAULTS["beta_slow"],
                "yarn_mscale": None,
                "yarn_mscale_all_dim": None,
                "yarn_correction_range_round_to_int": hf_keys.YARN_DEFAULTS["truncate"],
            }
            if yarn
            else {},
        )

    def hf_config(
        self, architecture: Architecture, dtype: str, end_of_document: int | None
    ) -> dict[str, Any]:
        a = architecture
        scaling = self.hf_scaling(a)
        return {
            "architectures": [self.hf_class],
            "model_type": self.name,
            "hidden_size": a.hidden_size,
            "intermediate_size": a.ffn_hidden_size,
            "num_hidden_layers": a.num_layers,
            "num_attention_heads": a.num_attention_heads,
            "num_key_value_heads": a.num_query_groups,
            "head_dim": a.kv_channels,
            "hidden_act": "silu",
            "rms_norm_eps": a.norm_epsilon,
            # Before transformers 5 the first two keys; since then the third.
            "rope_theta": a.rotary_base,
            **({"rope_scaling": scaling} if scaling else {}),
            "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": a.rotary_base},
            "max_position_embeddings": a.seq_length,
            "vocab_size": a.vocab_size,
            "tie_word_embeddings": a.tied_embeddings,
            "initializer_range": a.init_method_std,
            "bos_token_id": end_of_document,
            "eos_token_id": end_of_document,
            "dtype": dtype,
            "torch_dtype": dtype,  # the name before transformers 4.56
        }

    def hf_scaling(self, architecture: Architecture) -> dict[str, Any]:
        """What Hugging Face's config says about scaled rotary embeddings; empty: they are not scaled."""
        a = architecture
        if a.yarn_rotary_scaling_factor is None:
            return {}
        return {
            "rope_type": "yarn",
            "factor": a.yarn_rotary_scaling_factor,
            "original_max_position_embeddings": a.yarn_original_max_position_embeddings,
        }

    def architecture(self, hf_config: Mapping[str, Any]) -> Architecture:
        theirs = {**self.hf_defaults, **hf_config}
        if theirs.get("hidden_act", "silu") != "silu":
            raise ValueError(f'hidden_act is {theirs["hidden_act"]!r}; only "silu" is supported')
        own = self.own_values(theirs)
        heads, hidden = (hf_keys.size(theirs, key) for key in ("num_attention_heads", "hidden_size"))
        return Architecture(
            family=self.name,
            num_layers=hf_keys.size(theirs, "num_hidden_layers"),
            hidden_size=hidden,
            ffn_hidden_size=hf_keys.size(theirs, "intermediate_size"),
            num_attention_heads=heads,
            num_query_groups=hf_keys.size(theirs, "num_key_value_heads", heads),
            kv_channels=hf_keys.size(theirs, "head_dim", hidden // heads),
            seq_length=hf_keys.size(theirs, "max_position_embeddings"),
            vocab_size=hf_keys.size(theirs, "vocab_size"),
            padded_vocab_size=hf_keys.size(theirs, "vocab_size"),
            rotary_base=hf_keys.rotary(theirs)["rope_theta"],
            norm_epsilon=hf_keys.number(theirs, "rms_norm_eps", 1e-6),
            tied_embeddings=bool(theirs.get("tie_word_embeddings", False)),
            init_method_std=hf_keys.number(theirs, "initializer_range", 0.02),
            **hf_keys.scaling(theirs, self.rope_types),
            **own,
        )

    def own_values(self, theirs: hf_keys.Keys) -> dict[str, Any]:
        """The values of `own_fields` in Hugging Face's config, which here has defaults for missing keys.

        Raises ValueError, in one line, for keys that make it a model which is not of this family as it is here.
        """
        return {}


def gated_mlp(architecture: Architecture, ours: str, theirs: Sequence[str]) -> Sequence[Parameter]:
    """The two matrices of a SwiGLU MLP.

    Args:
        ours: what the names of both begin with.
        theirs: Hugging Face's names of gate, up and down.
    """
    hidden, ffn = architecture.hidden_size, architecture.ffn_hidden_size
    gate, up, down = theirs
    return (
        # The gate on top of up: [2 * ffn, hidden] <-> twice [ffn, hidden]. A slice has its part of both.
        Parameter(
            ours + "linear_fc1.weight",
            (2 * ffn, hidden),
            tp_dim=0,
            hf=(gate, up),
            rows=Rows((ffn, ffn), cut_each=True),
            linear=True,
        ),
        Parameter(
            ours + "linear_fc2.weight", (hidden, ffn), init="residual", tp_dim=1, hf=(down,), linear=True
        ),
    )
