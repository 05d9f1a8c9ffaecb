"""A model that several tests work out by hand."""

from megatron_noloco.model.architecture import Architecture

# Two layers of width 16, four heads of 6 channels in two groups, samples of 8 tokens.
SMALL = Architecture(
    family="llama",
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    seq_length=8,
    vocab_size=30,
    padded_vocab_size=32,
    rotary_base=1e4,
    norm_epsilon=1e-5,
    tied_embeddings=False,
    init_method_std=0.02,
)
