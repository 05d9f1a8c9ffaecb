"""What is learnt of a chat, beside what TRL 1.16 learns with `assistant_only_loss` and its template for training.

TRL's side was recorded: chat_templates/*_training.jinja of its package, with `return_assistant_tokens_mask`.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.kit.chats import CHAT, chat_tokenizer, write
from tests.kit.datasets import load_records
from tests.kit.tokenizers import tokenizer_at

TEMPLATES = Path(__file__).parents[1] / "chat_templates"
OF_TRL = {
    "deepseek-v3": ["<｜Assistant｜>three four<end>", "<｜Assistant｜>six<end>"],  # noqa: RUF001
    "gemma-2": ["three four<end_of_turn>\n", "six<end_of_turn>\n"],
    "llama-3.2": ["three four<|eot_id|>", "six<|eot_id|>"],
    "phi-3.5": ["three four<|end|>\n", "six<|end|>\n<end>"],
    "qwen2.5": ["\nthree four<|im_end|>\n", "\nsix<|im_end|>\n"],
    "qwen3": ["<think>\n\n</think>\n\nthree four<|im_end|>\n", "<think>\n\n</think>\n\nsix<|im_end|>\n"],
}
OURS = OF_TRL | {
    # The generation prompt writes the rest, which a model only reads.
    "deepseek-v3": ["three four<end>", "six<end>"],
    "qwen2.5": ["three four<|im_end|>\n", "six<|im_end|>\n"],
    # TRL has no training template of these.
    "mistral": [" three four<end>", " six<end>"],
    "mistral-v0.3": [" three four<end>", " six<end>"],
    "phi-4": ["three four<|im_end|>", "six<|im_end|>"],
    "smollm2": ["three four<|im_end|>\n", "six<|im_end|>\n"],
}


@pytest.mark.parametrize("family", sorted(file.stem for file in TEMPLATES.glob("*.jinja")))
def test_answer_and_its_end_are_learnt_and_nothing_else(family: str, tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", (TEMPLATES / f"{family}.jinja").read_text())
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer, path = tokenizer_at(folder), write(tmp_path / "a.jsonl", {"messages": CHAT[1:]})
    if family not in OURS:  # DeepSeek-R1, whose generation prompt is not how an answer begins
        with pytest.raises(ValueError, match="so generation would read other text"):
            load_records(path, tokenizer)
        return
    found = []
    for record in load_records(path, tokenizer):
        edges = np.flatnonzero(np.diff(record.answer, prepend=False, append=False))
        found += [tokenizer.decode(record.tokens[a:b], special=True) for a, b in edges.reshape(-1, 2)]
    assert found == OURS[family]
