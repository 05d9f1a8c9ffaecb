"""The blocks of the user's file that are ours, but for `data`; DeepSpeed's keys stand beside them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Method = Literal["noloco", "diloco", "none"]


class Block(BaseModel):
    """Strict: "10" is not 10 and true is not 1, because a guess that is wrong costs days of training."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RoutingConfig(Block):
    interval: Literal["round", "step", "microbatch", "off"] = Field(
        default="round",
        description="How often the pipelines of the replicas are reshuffled among each other.",
    )


class NolocoConfig(Block):
    enabled: bool = Field(default=True, description='false is the same as method "none".')
    method: Method = Field(
        default="noloco",
        description='With whom a replica averages: "noloco" a random group, "diloco" all, "none" nobody.',
    )
    local_steps: Positive = Field(default=50, description="k: inner optimizer steps between two rounds.")
    outer_momentum: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="alpha: the share of the outer momentum buffer kept from round to round.",
    )
    outer_lr: float = Field(
        default=0.7, gt=0, description="beta: the weight of the group's mean outer gradient."
    )
    consensus_weight: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="gamma: the pull towards the group's mean slow weights; null means outer_lr.",
    )
    group_size: Annotated[int, Field(ge=2)] = Field(
        default=2, description='n: replicas in a group; 2 is a pair (method "noloco" only).'
    )
    grouping: Literal["replica", "stage"] = Field(
        default="replica",
        description="Whether groups are drawn for whole replicas or for each stage on its own.",
    )
    transport: Literal["auto", "mpi", "torch"] = Field(
        default="auto",
        description='What carries the exchange; "auto" is MPI when the job was started by mpirun.',
    )
    deadline_seconds: float = Field(
        default=600.0,
        gt=0,
        description="How long a replica waits for its group before the round counts as failed.",
    )
    slow_weights: Literal["host", "device"] = Field(
        default="host",
        description="Where slow weights and outer momentum live: host memory, or the accelerator's.",
    )
    routing: RoutingConfig = Field(
        default=RoutingConfig(), description="Which replicas a microbatch visits, stage by stage."
    )

    @property
    def active_method(self) -> Method:
        """The method that runs: `enabled: false` is "none"."""
        return self.method if self.enabled else "none"

    @property
    def gamma(self) -> float:
        """The consensus weight in force."""
        return self.outer_lr if self.consensus_weight is None else self.consensus_weight

    def group_size_among(self, replicas: int) -> int:
        """How many of `replicas` average together in a round; 1 is nobody."""
        if replicas == 1:
            return 1
        return {"noloco": self.group_size, "diloco": replicas, "none": 1}[self.active_method]


class ParallelConfig(Block):
    replicas: Positive | Literal["auto"] = Field(
        default="auto", description='Full copies of the model; "auto" is as many as the ranks allow.'
    )
    tensor_model_parallel_size: Positive = Field(default=1, description="Slices of every layer.")
    pipeline_model_parallel_size: Positive = Field(default=1, description="Pipeline stages of a replica.")
    virtual_pipeline_model_parallel_size: Positive = Field(
        default=1, description="Model chunks per stage, interleaved."
    )
    data_parallel_size: Positive = Field(
        default=1, description="Synchronous data parallelism inside a replica."
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Split the sequence over tensor-parallel ranks outside attention and MLP.",
    )


class ModelConfig(Block):
    num_layers: Positive = Field(description="Transformer layers.")
    hidden_size: Positive = Field(description="Width of the residual stream.")
    ffn_hidden_size: Positive = Field(description="Width inside the gated MLP.")
    num_attention_heads: Positive = Field(description="Query heads.")
    num_query_groups: Positive | None = Field(
        default=None, description="Key/value heads; null means one per query head."
    )
    kv_channels: Positive | None = Field(
        default=None, description="Width of one head; null means hidden_size / num_attention_heads."
    )
    seq_length: Positive = Field(description="Tokens in a sample.")
    vocab_size: Positive | None = Field(
        default=None, description="Vocabulary before padding; null means the tokenizer's."
    )
    make_vocab_size_divisible_by: Positive = Field(
        default=128,
        description="The vocabulary is padded to a multiple of this, whatever the tensor-parallel size.",
    )
    rotary_base: Annotated[float, Field(gt=0)] = Field(
        default=10000.0, description="Base of the rotary embedding."
    )
    norm_epsilon: float = Field(default=1e-5, gt=0, description="Epsilon of RMSNorm.")
    untie_embeddings_and_output_weights: bool = Field(
        default=True, description="Whether the output layer has weights of its own."
    )
    init_method_std: float = Field(
        default=0.02, gt=0, description="Standard deviation of the initial weights."
    )
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the residual branches.")
    attention_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the attention weights.")
    recompute_granularity: Literal["full", "selective"] | None = Field(
        default=None,
        description='Activations computed again in backward: "full" layers, "selective" attention.',
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        default=None,
        description='With "full": recompute all layers in equal units, or only the first of a stage.',
    )
    recompute_num_layers: Positive | None = Field(
        default=None,
        description='Layers per unit ("uniform") or recomputed layers per model chunk ("block").',
    )
    transformer_impl: Literal["auto", "local", "transformer_engine"] = Field(
        default="auto",
        description='Megatron layer specs; "auto" is Transformer Engine where it is installed.',
    )

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def padded_vocab_size(self, tokenizer_vocab: int | None = None) -> int:
        """Rows of the embedding: `vocab_size`, else the tokenizer's, rounded up.

        Independent of tensor parallelism, so that the model (and its checkpoint) does not depend on the topology.
        """
        vocab = self.vocab_size or tokenizer_vocab
        if vocab is None:
            raise ValueError(
                "the vocabulary is not known: model.vocab_size is null and no tokenizer was asked"
            )
        if tokenizer_vocab is not None and vocab < tokenizer_vocab:
            raise ValueError(f"model.vocab_size {vocab} is less than the tokenizer's {tokenizer_vocab}")
        return -(-vocab // self.make_vocab_size_divisible_by) * self.make_vocab_size_divisible_by


class TrainingConfig(Block):
    train_iters: Positive = Field(description="Local steps of the whole run.")
    seed: NonNegative = Field(default=1234, description="Seed of weights, sample order, groups and routes.")
    log_interval: Positive = Field(default=10, description="Local steps between two log lines.")
    eval_interval: NonNegative = Field(
        default=0, description="Local steps between two evaluations; 0: at the end only."
    )
    eval_iters: NonNegative = Field(
        default=10,
        description="Microbatches per evaluation and dataset (virtual stages: rounded up to a multiple of the "
        "stages); 0 switches evaluation off.",
    )
    eval_full: bool = Field(
        default=False, description="Whether an evaluation takes all of the validation split, not eval_iters."
    )
    eval_mean_model: bool = Field(
        default=True,
        description="Whether the mean of the replicas is evaluated too; needs their weights exchanged.",
    )
    output_dir: str = Field(
        default="runs/default", min_length=1, description="Folder for logs and checkpoints."
    )
    tensorboard: bool = Field(default=True, description="Whether scalars are also written for TensorBoard.")
    save_interval: NonNegative = Field(
        default=0, description="Local steps between two checkpoints; 0: only when the run is asked to stop."
    )
    keep_last: Positive = Field(default=2, description="Complete checkpoints kept; older ones are removed.")
    async_save: bool = Field(
        default=False, description="Whether training goes on while a copy of the state is being written."
    )
    load: str = Field(
        default="auto",
        min_length=1,
        description='"auto": continue from the newest sound checkpoint in output_dir; "none"; or a step folder.',
    )
    pretrained: str | None = Field(
        default=None,
        description="Folder of a Hugging Face Llama whose weights every replica starts from; null: random.",
    )
    fewer_replicas: Literal["drop", "fold"] = Field(
        default="drop",
        description="Resumed with fewer replicas: forget the others, or fold them into the mean of those kept.",
    )
    exit_duration_minutes: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Save and exit after so many minutes; null: never."
    )
