"""Conversations for fine-tuning: what their messages may hold, and what a chat template makes of them."""

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_noloco.errors import UserError
from megatron_noloco.files import sha256_of
from megatron_noloco.job.activity import line_of

_KEYS = ("role", "content", "name", "tool_call_id", "weight")  # others must change what the template writes
_NOT_RENDERED = ("role", "name", "tool_call_id")  # templates may leave them out, or write other words
_NOTHING: tuple[object, ...] = ("", [], {})  # values that datasets write where a message has no such key
_OF_CALLS = ("name", "arguments")
_CLOCK = "strftime_now"  # the only way to a date that transformers gives to templates
_CLOCK_THAT_STANDS = '{% macro strftime_now(format) %}{{ format | replace("%", "DAY") }}{% endmacro %}'


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

    @property
    def renderer(self) -> list[str]:
        """Versions of the packages on which depends what it writes; empty without a template or packages."""
        with suppress(PackageNotFoundError):
            return [version(name) for name in ("transformers", "jinja2")] if self._content else []
        return []

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


def render_conversation(
    messages: list[Any], tools: Any, template: ChatTemplate
) -> tuple[str, list[tuple[int, int]], int]:
    """Return a conversation as the chat template renders it, where its answers lie, and how many are empty.

    An answer is what the template adds to the messages before it, which are rendered with a generation prompt. Of
    each the first character is returned, and the one after its last; an answer of weight 0 is left out.
    Raises UserError for a message that holds anything unknown, and for a template that does not render all of it.
    """
    text = template.text(tools)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError('"tools" must be a list of objects')
    given = [_read(number, message) for number, message in enumerate(messages, 1)]
    learnt = [_has_loss(number, message) for number, message in enumerate(given, 1)]
    if not any(learnt):
        some = any(message["role"] == "assistant" for message in given)
        reason = "each answer has weight 0" if some else 'no message has the role "assistant"'
        raise UserError(f"{reason}: there is nothing to learn")
    if given[0]["role"] == "assistant":
        raise UserError(
            'message 1 has the role "assistant": an answer needs a message before it, such as one of "user"'
        )
    shown = [{key: value for key, value in message.items() if key != "weight"} for message in given]
    whole = template.render(shown, tools)
    if tools and _renders(template, shown, None, text) == whole:
        raise UserError('there are "tools", which the chat template does not read')
    _check_read(whole, shown, tools, template)
    places = [place for place, has_loss in enumerate(learnt) if has_loss]
    answers = [_find_answer(place, whole, shown, tools, template) for place in places]
    _check_rendered(whole, shown)
    if _CLOCK in text:
        _check_clock(template, shown, tools)
    return whole, answers, sum(_is_empty(given[place]) for place in places)


def in_words(value: Any) -> str:
    """Return what a line of JSON, or a message in it, holds: keys with the kinds of their values, or its kind."""
    if isinstance(value, dict):
        return "has " + (", ".join(f'"{key}" ({_kind(held)})' for key, held in value.items()) or "no keys")
    return f"is {_kind(value)}"


def _kind(value: Any) -> str:
    if value == []:
        return "an empty list"
    kinds = {str: "text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


# Messages


def _read(number: int, message: Any) -> dict[str, Any]:
    """Return a message, its parts joined, without keys that are null.

    Raises UserError for what a message may not hold.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(
            f'message {number} {in_words(message)}; each must be an object with "role" and "content"'
        )
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_text_of(number, part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise UserError(
            f'message {number}: "content" must be text or a list of parts, not {json.dumps(content)[:40]}'
        )
    if content in (None, []) and not any(value for key, value in message.items() if key not in _KEYS):
        raise UserError(f'message {number} has no "content"')
    return message


def _text_of(number: int, part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text), **others} if not any(others.values()):
            return text
    raise UserError(
        f'message {number}: a part of "content" must be {{"type": "text", "text": "..."}}, not '
        f"{json.dumps(part)[:60]}"
    )


def _has_loss(number: int, message: dict[str, Any]) -> bool:
    """Return whether a message is an answer that is learnt; raises UserError for another weight than 0 or 1."""
    is_answer = message["role"] == "assistant"
    weight = message.get("weight", int(is_answer))
    if weight not in (0, 1):
        raise UserError(f'message {number}: "weight" must be 0 or 1, not {json.dumps(weight)[:40]}')
    if weight and not is_answer:
        raise UserError(
            f'message {number}: "weight" 1 on the role "{message["role"]}", but only answers (the role '
            '"assistant") have a loss'
        )
    return bool(weight)


def _is_empty(message: dict[str, Any]) -> bool:
    given = {key: value for key, value in message.items() if key == "content" or key not in _KEYS}
    return not any(value.strip() if isinstance(value, str) else value for value in given.values())


# Rendering


def _find_answer(
    place: int, whole: str, messages: list[dict[str, Any]], tools: Any, template: ChatTemplate
) -> tuple[int, int]:
    before = template.render(messages[:place], tools, add_generation_prompt=True)
    through = template.render(messages[: place + 1], tools)
    if through.startswith(before) and whole.startswith(through):
        return len(before), len(through)
    unasked = template.render(messages[:place], tools)
    if through.startswith(unasked) and whole.startswith(through):
        raise UserError(
            f"the chat template asks for an answer with other words than message {place + 1} begins with, so the "
            "answer cannot be found; use a template with the same words in both"
        )
    raise UserError(
        f"the chat template renders messages 1 to {place + 1} differently when others follow, so the answer in "
        f"message {place + 1} cannot be found; split the conversation there, or use a template that renders a "
        "message regardless of later ones"
    )


def _check_read(whole: str, messages: list[dict[str, Any]], tools: Any, template: ChatTemplate) -> None:
    """Raise UserError for a key of a message without which the rendering is the same."""
    for place, message in enumerate(messages):
        for key, value in message.items():
            if key in _KEYS or value in _NOTHING:
                continue
            without = {other: held for other, held in message.items() if other != key}
            if _renders(template, [*messages[:place], without, *messages[place + 1 :]], tools) == whole:
                raise UserError(
                    f'message {place + 1} has the key "{key}", which the chat template does not read; there may '
                    f"be {', '.join(_KEYS)}, and what the template reads"
                )


def _renders(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, text: str | None = None
) -> str | None:
    """Return the text of a conversation; None where the template refuses it."""
    try:
        return template.render(messages, tools, template=text)
    except UserError:
        return None


def _check_rendered(whole: str, messages: list[dict[str, Any]]) -> None:
    """Raise UserError where a text of a message is not in the rendering, as often as in all messages together.

    Spaces do not count, since templates trim. Some write the content of tools as JSON, where it is escaped.
    """
    rendered = _without_spaces(whole)
    texts = [
        (number, key, text) for number, message in enumerate(messages, 1) for key, text in _texts_of(message)
    ]
    given = [_without_spaces(text) for _, _, text in texts]
    for plain, (number, key, text) in zip(given, texts, strict=True):
        forms = {plain}
        if key == "content":
            forms.add(_without_spaces(json.dumps(text, ensure_ascii=False)[1:-1]))
        if plain and sum(map(rendered.count, forms)) < sum(other.count(plain) for other in given):
            advice = "give them as an object" if key == "arguments" else "leave it out of the data"
            raise UserError(
                f'the chat template leaves out or changes the text of "{key}" in message {number} (role '
                f'"{messages[number - 1]["role"]}"); use a template that writes it as it is, or {advice}'
            )


def _texts_of(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of what a template must write, tool calls as their names and arguments."""
    for key, value in message.items():
        if isinstance(value, str) and key not in _NOT_RENDERED:
            yield key, value
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        match call:
            case {"function": dict(function)} | dict(function):
                yield from ((key, function[key]) for key in _OF_CALLS if isinstance(function.get(key), str))


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _check_clock(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any) -> None:
    """Raise UserError where a conversation reads differently on another day."""
    clocks = [_CLOCK_THAT_STANDS.replace("DAY", day) for day in "12"]
    one, other = (template.render(messages, tools, template=clock + template.text(tools)) for clock in clocks)
    if one != other:
        raise UserError(
            f"the chat template writes the present date ({_CLOCK}), so a resume would read other data; put a date "
            'in its place, such as "01 Jan 2025"'
        )
