"""Which of Megatron-core's language models a stage is made of.

`GPTModel` while core has it: it is deprecated since 0.19, and only critical errors are mended. Then `HybridModel`,
whose numbers are the same (`tests/unit/test_contracts.py`).
"""

try:
    from megatron.core.models.gpt.gpt_model import GPTModel as LanguageModel
except ImportError:
    from megatron_noloco.model.hybrid import HybridLanguageModel as LanguageModel

__all__ = ["LanguageModel"]
