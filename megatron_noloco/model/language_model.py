"""Which of Megatron-core's language models a stage is made of.

`GPTModel` while core has it: it is deprecated since 0.19, and only critical errors are mended (Megatron-LM #6071).
Then `HybridModel`, whose numbers are the same (`tests/unit/test_contracts.py`). When core has no `GPTModel`:

1. Make `HybridLanguageModel` the base of `Chunk` (`stage`), and remove this file and the two tests of it.
2. `get_gpt_layer_local_spec` and its like for Transformer Engine may go with it. The local one is then thirty
   lines of `stage` (a `TransformerLayer` of `SelfAttention` and `MLP`, of which four places are ours already), the
   other comes from core's `hybrid_stack_spec`. `HybridModel` with Transformer Engine has not been run.
3. `examples/megatron_loop.py` builds a `GPTModel` of its own.
"""

try:
    from megatron.core.models.gpt.gpt_model import GPTModel as LanguageModel
except ImportError:
    from megatron_noloco.model.hybrid import HybridLanguageModel as LanguageModel

__all__ = ["LanguageModel"]
