"""A plugin of pytest that takes `GPTModel` from Megatron-core: `pytest -p tests.without_gpt_model FILES`."""

from megatron.core.models.gpt import gpt_model

del gpt_model.GPTModel
