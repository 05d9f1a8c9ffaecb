"""Records and conversations, and tokenizers with their templates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Tokenizers

from megatron_noloco.data.tokenizer import Tokenizer
from tests.kit.datasets import Learnt
from tests.kit.tokenizers import make_tokenizer

# Answers end with a token of their own, which is of the answer, and so is the newline after it.
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<end>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Größe"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "three four"},
    {"role": "user", "content": "five"},
    {"role": "assistant", "content": "six"},
]


def chat_tokenizer(folder: Path, template: str) -> Path:
    folder.mkdir(exist_ok=True)
    make_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def stopping_tokenizer(folder: Path, template: str) -> Path:
    """With a special token <stop> beside <end>, which ends documents."""
    chat_tokenizer(folder, template)
    tokenizer = Tokenizers.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<stop>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def answers(record: Learnt, tokenizer: Tokenizer) -> str:
    """The text of the tokens that have a loss; special tokens are left out."""
    return tokenizer.decode(record.tokens[record.answer])


def record(length: int, first: int = 0, answered: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Counting tokens, unsigned as those of a tokenizer are, of which the last `answered` are the answer."""
    return np.arange(first, first + length, dtype=np.uint16), np.arange(length) >= length - answered


ASKED, ANSWER = {"role": "user", "content": "two"}, {"role": "assistant", "content": "three four"}
CALLS = TEMPLATE.replace(
    "{{ message['content'] }}",
    "{{ message.content | tojson if message.role == 'tool' else message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}",
)


def called(arguments: Any) -> list[dict[str, Any]]:
    """A conversation in which the assistant calls a tool, whose answer holds quotes and a new line."""
    call = {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": arguments}}
    return [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "1", "content": '{"sky":\n "blue"}'},
        ANSWER,
    ]
