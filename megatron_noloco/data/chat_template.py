"""The chat template of a tokenizer, which transformers renders."""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_noloco.errors import UserError
from megatron_noloco.job.activity import line_of


def sha256_of(content: Any) -> str:
    """Return the hex SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class ChatTemplate:
    """A chat template, or several by name. A tokenizer without any has one without content."""

    def __init__(self, folder: Path | None, content: Any) -> None:
        """Keep what was found; nothing is loaded before it is needed.

        Args:
            folder: of the tokenizer; None: of the byte tokenizer.
            content: the texts, as the files of the tokenizer have them; None where there is none.
        """
        self._folder, self._content = folder, content

    @property
    def digest(self) -> str:
        """Hex SHA-256 of its texts; "" where there is none."""
        return sha256_of(self._content) if self._content else ""

    def text(self, tools: Any = None) -> str:
        """Return the template for conversations with these tools; raises UserError where there is none."""
        return self._loaded.get_chat_template(tools=tools)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """Return the text of a conversation.

        Raises UserError where there is no template, or the template refuses the messages.

        Args:
            tools: the tools that the assistant may call, in the form that the template takes.
            add_generation_prompt: whether to append the beginning of an answer.
            template: the text of another template; None: this one.
        """
        chosen = template or self.text(tools)
        try:
            return self._loaded.apply_chat_template(
                messages,
                tools=tools,
                chat_template=chosen,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # templates raise anything for messages that they do not expect
            raise UserError(f"the chat template refuses the messages: {line_of(error)}") from None

    @cached_property
    def _loaded(self) -> Any:
        """The tokenizer as transformers loads it, which knows the texts that a template may name, such as BOS."""
        if self._folder is None or not self._content:
            whose = f"tokenizer_model {self._folder}" if self._folder else "the byte tokenizer"
            raise UserError(
                f"{whose} has no chat template (a chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give prompt and completion, or another tokenizer_model"
            )
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError:
            raise UserError("chat templates need a package: pip install transformers") from None
        return PreTrainedTokenizerFast.from_pretrained(self._folder)
