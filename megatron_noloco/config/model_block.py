"""The block `model`: its fields, the rules between them, and the architecture it stands for."""

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from megatron_noloco.errors import UserError
from megatron_noloco.fields import Positive, Scope, Settings, Size, count, field, offered_field, quoted
from megatron_noloco.model.architecture import Architecture, Compute, LoadBalancing, PipelineSplit, Precision
from megatron_noloco.model.families import FAMILIES, families_with

RecomputedModule = Literal["core_attn", "mlp", "moe"]

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]


def _only(field: str) -> str:
    """Return the beginning of the description of a field that only some families have."""
    return f"Family {quoted(families_with(field))} only: "


def _null(field: str) -> str:
    """Return the end of the description of such a field: what null stands for in each family."""
    defaults = (f"{FAMILIES[name].own_fields[field]} in {name}" for name in families_with(field))
    return f"; null: {', '.join(defaults)}."


class ModelConfig(Settings):
    """The model, with Megatron's names."""

    scope = Scope.SHARED

    family: FamilyName = field("llama", "Which kind of model; also Hugging Face's model_type.")
    num_layers: Positive = field(..., "Transformer layers.", le=10_000)
    hidden_size: Positive = field(..., "Width of the residual stream.")
    ffn_hidden_size: Positive = field(..., "Width inside the MLP.")
    num_attention_heads: Positive = field(..., "Query heads.")
    num_query_groups: Positive | None = field(None, "Key/value heads; null means one per query head.")
    kv_channels: Positive | None = field(
        None, "Width of one head; null means hidden_size / num_attention_heads."
    )
    seq_length: Positive = field(..., "Tokens in a sample.")
    vocab_size: Positive | None = field(None, "Vocabulary before padding; null means the tokenizer's.")
    make_vocab_size_divisible_by: Positive = offered_field(
        128, "The vocabulary is padded to a multiple of this, whatever the tensor-parallel size."
    )
    rotary_base: Annotated[float, Field(gt=1)] = field(10000.0, "Base of the rotary embedding.")
    norm_epsilon: float = field(1e-5, "Epsilon of the norms.", gt=0)
    untie_embeddings_and_output_weights: bool = field(
        True, "Whether the output layer has weights of its own."
    )
    init_method_std: float = field(0.02, "Standard deviation of the initial weights.", gt=0)
    yarn_rotary_scaling_factor: Annotated[float, Field(ge=1)] | None = field(
        None,
        "How many times longer YaRN makes the context of a model, such as 4 in Qwen2.5 and Qwen3; null: "
        "rotary frequencies are as trained.",
    )
    yarn_original_max_position_embeddings: Positive | None = field(
        None, "With YaRN: tokens of the context that the model was trained with, such as 32768."
    )
    rope_scaling_factor: Annotated[float, Field(ge=1)] | None = field(
        None,
        _only("rope_scaling_factor")
        + "factor that scales the rotary frequencies (8 in Llama 3.1, 32 in 3.2); null: they are not scaled.",
    )
    sliding_window: Positive | None = field(
        None,
        _only("sliding_window")
        + "tokens that a token attends to, itself included; null: all earlier tokens.",
    )
    num_moe_experts: Annotated[Positive, Field(le=10_000)] | None = field(
        None, _only("num_moe_experts") + "experts of a layer" + _null("num_moe_experts")
    )
    moe_router_topk: Annotated[int, Field(ge=2)] | None = field(
        None, _only("moe_router_topk") + "experts that compute a token" + _null("moe_router_topk")
    )
    moe_router_load_balancing_type: LoadBalancing | None = field(
        None,
        _only("moe_router_load_balancing_type")
        + 'a loss balances the experts over the tokens of a microbatch ("aux_loss") or of each sequence '
        '("seq_aux_loss"); "none": there is no such loss; null: "aux_loss".',
    )
    moe_aux_loss_coeff: Size | None = field(
        None,
        _only("moe_aux_loss_coeff")
        + "factor of the loss that balances the experts, which is added up over the layers; null: 0.01.",
    )
    hidden_dropout: float = field(0.0, "Dropout on the residual branches.", ge=0, lt=1)
    attention_dropout: float = field(0.0, "Dropout on the attention weights.", ge=0, lt=1)
    z_loss_coeff: float = field(
        0.0,
        "Coefficient of the z-loss, the mean of logsumexp(logits)^2 over the tokens, such as 1e-4. Losses are "
        "shown without it.",
        ge=0,
    )
    recompute_granularity: Literal["full", "selective"] | None = offered_field(
        None,
        'Activations computed again in backward: "full" layers, "selective" the parts of them in '
        "recompute_modules.",
    )
    recompute_method: Literal["uniform", "block"] | None = offered_field(
        None,
        'With "full": "uniform" recomputes all layers in equal units, "block" the first layers of a stage.',
    )
    recompute_num_layers: Positive | None = offered_field(
        None, 'Layers per unit ("uniform") or recomputed layers per model chunk ("block").'
    )
    recompute_modules: Annotated[list[RecomputedModule], Field(min_length=1)] | None = offered_field(
        None, 'With "selective": "core_attn", "mlp", or "moe" in a mixture of experts; null: ["core_attn"].'
    )
    transformer_impl: Literal["auto", "local", "transformer_engine"] = offered_field(
        "auto", 'Megatron layer specs; "auto" is Transformer Engine where it is installed.'
    )

    def rules(self) -> Iterator[str]:
        for rule in (
            _check_family,
            _check_heads,
            _check_rotary_scaling,
            _check_experts,
            _check_recomputation,
        ):
            yield from rule(self)

    def meant(self, tokenizer_vocab: int = 0) -> dict[str, Any]:
        """Return all fields, with what null stands for where it stands for a value.

        Args:
            tokenizer_vocab: tokens of the tokenizer; 0: not known.
        """
        fields = self.model_dump()
        own = {name: self.own(name) for name in fields if families_with(name)}
        settled = {
            "num_query_groups": self.query_groups,
            "kv_channels": self.head_size,
            "vocab_size": self.vocab_size or tokenizer_vocab or None,
        }
        return fields | own | settled

    def shared(self) -> dict[str, Any]:
        meant = self.meant()
        return {name: meant[name] for name in super().shared()}

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def own(self, field: str) -> Any:
        """Return the value of a field that only some families have: the file's, else the family's, else None."""
        value = getattr(self, field)
        return FAMILIES[self.family].own_fields.get(field) if value is None else value

    def architecture(self, tokenizer_vocab: int = 0) -> Architecture:
        """Return the architecture for a tokenizer of `tokenizer_vocab` tokens; 0: not known, `vocab_size` decides.

        Padding does not depend on tensor parallelism, so that the model (and its checkpoint) does not depend on
        the topology. Raises UserError when the vocabulary is not known or smaller than the tokenizer's.
        """
        vocab = self.vocab_size or tokenizer_vocab
        if not vocab:
            raise UserError("model.vocab_size is null, and there is no tokenizer to take it from")
        if vocab < tokenizer_vocab:
            raise UserError(
                f"model.vocab_size {vocab} is smaller than the tokenizer's {tokenizer_vocab}; "
                f"set it to {tokenizer_vocab} or leave it out"
            )
        multiple = self.make_vocab_size_divisible_by
        names = {field.name for field in fields(Architecture)}
        return Architecture(
            **{name: value for name, value in self.meant(vocab).items() if name in names},
            padded_vocab_size=-(-vocab // multiple) * multiple,
            tied_embeddings=not self.untie_embeddings_and_output_weights,
        )

    def compute(self, precision: Precision, separate_documents: bool, split: PipelineSplit) -> Compute:
        """Return how this model is computed with numbers of `precision`."""
        names = {field.name for field in fields(Compute)}
        return Compute(
            **{name: value for name, value in self.meant().items() if name in names},
            precision=precision,
            separate_documents=separate_documents,
            split=split,
        )


def _check_family(model: ModelConfig) -> Iterator[str]:
    for name in type(model).model_fields:
        families = families_with(name)
        if families and model.family not in families and getattr(model, name) is not None:
            yield (
                f'{name} is not a field of the family "{model.family}", only of {quoted(families)}; '
                "leave it out"
            )


def _check_heads(model: ModelConfig) -> Iterator[str]:
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.query_groups
    if model.kv_channels is None and hidden % heads:
        yield (
            f"hidden_size {hidden} does not divide into {count(heads, 'attention head')} "
            f"({hidden} / {heads} = {hidden / heads:.2f}); set model.kv_channels or change one of them"
        )
    elif model.head_size % 2:
        name = "kv_channels" if model.kv_channels else "hidden_size / model.num_attention_heads"
        yield f"{name}: a head of {count(model.head_size, 'channel')} has no rotary embedding: it must be even"
    if heads % groups:
        yield f"num_attention_heads {heads} does not divide into model.num_query_groups {groups}"


def _check_rotary_scaling(model: ModelConfig) -> Iterator[str]:
    factor, before = model.yarn_rotary_scaling_factor, model.yarn_original_max_position_embeddings
    if (factor is None) != (before is None):
        yield (
            "yarn_rotary_scaling_factor and model.yarn_original_max_position_embeddings belong together; "
            "give both or neither"
        )
    elif factor is not None and model.own("rope_scaling_factor") is not None:
        yield "rope_scaling_factor and YaRN scale the same rotary frequencies; leave one of them out"


def _check_experts(model: ModelConfig) -> Iterator[str]:
    experts, chosen = model.own("num_moe_experts"), model.own("moe_router_topk")
    if experts is not None and chosen is not None and chosen > experts:
        yield f"moe_router_topk {chosen} is more than model.num_moe_experts {experts}"


def _check_recomputation(model: ModelConfig) -> Iterator[str]:
    for name in ("recompute_method", "recompute_num_layers"):
        given = getattr(model, name) is not None
        if model.recompute_granularity == "full" and not given:
            yield f'recompute_granularity "full" needs model.{name}'
        elif model.recompute_granularity != "full" and given:
            yield f'{name} has a meaning only with model.recompute_granularity "full"'
    if model.recompute_modules is not None:
        wrong = "mlp" if model.own("num_moe_experts") is not None else "moe"
        if model.recompute_granularity != "selective":
            yield 'recompute_modules has a meaning only with model.recompute_granularity "selective"'
        elif wrong in model.recompute_modules:
            yield f'recompute_modules: no layer of the family "{model.family}" has "{wrong}"'
