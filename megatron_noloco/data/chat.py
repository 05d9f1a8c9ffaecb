"""Conversations for fine-tuning: what their messages may hold, and what a chat template makes of them."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from functools import cache, cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, pairwise
from typing import Any, NamedTuple

from megatron_noloco.errors import UserError
from megatron_noloco.files import outside, sha256_of
from megatron_noloco.job.activity import line_of

Messages = list[dict[str, Any]]

_NOT_WRITTEN = ("role", "name", "tool_call_id")  # templates leave them out, or write other words
_CALLS = ("tools", "tool_calls", "function_call")
_NOTHING: tuple[object, ...] = ("", [], {})  # values that datasets write where a message has no such key
_NOW = re.compile(r"""strftime_now\((['"])(.*?)\1\)""")  # the only way to the date that transformers gives
_TODAY = date(2025, 1, 1)  # in its place: a resume must read the same text


class ChatTemplate:
    """A chat template, or several by name. A tokenizer without any has one without content."""

    def __init__(self, content: Any, load: Callable[[], Any]) -> None:
        """Keep the texts; nothing is loaded before a use.

        Args:
            content: a template, or several by name; None: there is none.
            load: returns the tokenizer of transformers, which knows texts that a template may name, such as BOS.
        """
        self._content, self._load = content, load
        self.takes_text = cache(self._takes_text)

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

    def render(self, messages: Messages, tools: Any = None, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation.

        Raises UserError where there is no template, or the template refuses the messages.

        Args:
            tools: the tools that the assistant may call, in the form that the template takes.
            add_generation_prompt: whether to append the beginning of an answer.
        """
        tokenizer = self._loaded
        try:
            template = tokenizer.get_chat_template(tools=tools)
            return tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=_NOW.sub(lambda call: repr(_TODAY.strftime(call[2])), template),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # templates raise anything for messages that they do not expect
            raise UserError(f"the chat template refuses the messages: {outside(line_of(error))}") from None

    @property
    def final(self) -> str:
        """The text of EOS, which a template may write after the last message only; "" if there is no EOS."""
        return self._loaded.eos_token or ""

    def _takes_text(self, with_tools: bool) -> bool:
        """Return whether the template takes the arguments of tool calls as JSON text, not as an object."""
        tools = [{"type": "function", "function": {"name": "f"}}] if with_tools else None
        arguments = {"key": "value"}

        def written(form: Any) -> str:
            call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": form}}
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            with suppress(UserError):
                return self.render([{"role": "user", "content": "a question"}, answer], tools)
            return ""

        of_object = written(arguments)
        refuses_object = not of_object or str(arguments) in of_object
        return refuses_object and json.dumps(arguments) in written(json.dumps(arguments))

    @cached_property
    def _loaded(self) -> Any:
        """The tokenizer of transformers; raises UserError where there is no template."""
        if not self._content:
            raise UserError(
                "the tokenizer has no chat template (a chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give prompt and completion, or another tokenizer_model"
            )
        return self._load()


class Answer(NamedTuple):
    """An answer as two texts."""

    before: str  # what generation reads before it, after the answer that precedes it in its list
    text: str  # its own, with what ends it


def answers_of(given: list[Any], tools: Any, template: ChatTemplate) -> tuple[list[list[Answer]], int]:
    """Return the answers of a conversation that have a loss, and how many of them are empty.

    The text before an answer is the template's of the messages before, with a generation prompt: what a chat would
    read there. Answers of which each continues the text through the one before are a list. A template that writes
    an earlier turn otherwise than the last one makes several lists.

    Raises UserError for a message that holds anything unknown, and where the template does not write a text.

    Args:
        given: the messages of a file, without null keys; of an answer with "weight": 0 nothing is learnt.
        tools: the tools that the assistant may call; None: none.
    """
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = json.loads(tools)
    messages = [_message(number, message, tools, template) for number, message in enumerate(given, 1)]
    places = [place for place, message in enumerate(messages) if message.pop("weight")]
    if not places:
        roles = ", ".join(dict.fromkeys(outside(message["role"]) for message in messages))
        raise UserError(
            f'no message has the role "assistant" and a weight above 0 (roles: {roles}): there is nothing to learn'
        )
    if not places[0]:
        raise UserError("message 1 is an answer, which no message asks for; leave it out")
    render = partial(template.render, tools=tools)
    lists = _lists(messages, places, render, template.final)
    before = _without_spaces("".join(chain(*lists[-1])).removesuffix(lists[-1][-1].text))
    _check_written("the record", {"tools": tools or []}, before)
    for place, message in enumerate(messages[: places[-1]]):
        if message["role"] != "assistant":
            _check_written(_in_words(place, message), message, before)
    for place, answer in zip(places, chain(*lists), strict=True):
        _check_written(_in_words(place, messages[place]), messages[place], _without_spaces(answer.text))
    learnt = [{**messages[place], **dict.fromkeys(_NOT_WRITTEN)} for place in places]
    return lists, sum(not any(map(str.strip, map(str, filter(None, message.values())))) for message in learnt)


def _message(number: int, given: Any, tools: Any, template: ChatTemplate) -> dict[str, Any]:
    """Return a message as the template takes it, with its weight: 1 if it has a loss, else 0.

    Parts are joined. Raises UserError for what a message may not hold.
    """
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise UserError(
            f'message {number} must have "role" and "content", not {json.dumps(given, default=str)[:60]}'
        )
    message = {key: value for key, value in given.items() if key == "content" or value not in _NOTHING}
    is_answer = message["role"] == "assistant"
    if message.setdefault("weight", int(is_answer)) not in (0, int(is_answer)):
        weight = json.dumps(message["weight"])[:40]
        raise UserError(f'message {number}: "weight" must be 0, or 1 for an answer (assistant), not {weight}')
    message["content"] = _text_of(number, message.get("content", ""))
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(call, template.takes_text(bool(tools))) for call in calls]
    return message


def _text_of(number: int, content: Any) -> str:
    """Return the text of a content, which may be a list of parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = list[str]()
    for part in parts:
        match part:
            case {"type": "text", "text": str(text), **others} if not any(others.values()):
                texts.append(text)
            case _:
                raise UserError(
                    f'message {number}: "content" must be text, or a list of {{"type": "text", "text": "..."}}, '
                    f"not {json.dumps(content, default=str)[:60]}"
                )
    return "".join(texts)


def _call(call: Any, as_text: bool) -> Any:
    """Return a tool call with its arguments, JSON text or an object, in the form that the template takes."""
    match call:
        case {"function": dict(function)}:
            return {**call, "function": _call(function, as_text)}
        case {"arguments": dict(arguments)} if as_text:
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        case {"arguments": str(arguments)} if not as_text:
            with suppress(ValueError):
                return {**call, "arguments": json.loads(arguments)}
    return call


def _answer(messages: Messages, place: int, render: Callable[..., str]) -> Answer:
    """Return the answer at this place; raises UserError where it does not begin as the template asks for it."""
    before = render(messages[:place], add_generation_prompt=True)
    through = render(messages[: place + 1])
    if not through.startswith(before):
        raise UserError(
            f"the chat template asks for message {place + 1} with {before[-40:]!r}, with which it does not begin "
            "the message itself, so generation would read other text; use a template with the same words in both"
        )
    return Answer(before, through[len(before) :])


def _lists(
    messages: Messages, places: list[int], render: Callable[..., str], final: str
) -> list[list[Answer]]:
    """Return the answers, in lists of which each continues one text.

    Each is rendered after the turn before it only, so the work grows with the messages, not with their square; or
    after all messages where the template writes a turn otherwise if others follow or precede it.

    Args:
        final: what a template may write after the last message only.
    """
    with suppress(UserError):  # of a turn without those before it
        lists = _rendered(messages, places, render, final, turns_apart=True)
        if len(lists) == 1 and "".join(chain(*lists[0])) == render(messages[: places[-1] + 1]):
            return lists
    return _rendered(messages, places, render, final, turns_apart=False)


def _rendered(
    messages: Messages, places: list[int], render: Callable[..., str], final: str, turns_apart: bool
) -> list[list[Answer]]:
    lists, through = list[list[Answer]](), ""
    for earlier, place in pairwise([0, *places]):
        turns = (n for n in range(earlier, 0, -1) if turns_apart and messages[n]["role"] == "user")
        if start := next(turns, 0):
            through = render(messages[start : earlier + 1])
        before, text = _answer(messages[start:], place - start, render)
        through_read = _as_read(through, before, messages[earlier]["content"], final)
        if through_read:
            asked, answer = lists[-1].pop()
            lists[-1].append(Answer(asked, answer.removesuffix(through[len(through_read) :])))
        else:
            lists.append([])
        lists[-1].append(Answer(before[len(through_read) :], text))
        through = before + text
    return lists


def _as_read(through: str, following: str, content: str, final: str) -> str:
    """Return the text through an answer as the text that follows begins, "" where it begins otherwise.

    It may lack what a template writes at the very end, such as EOS, where the answer has another end.
    """
    if following.startswith(through):
        return through
    read = through.removesuffix(final)
    has_end = not read.rstrip().endswith(content.rstrip())
    return read if has_end and following.startswith(read) else ""


def _in_words(place: int, message: dict[str, Any]) -> str:
    return f'message {place + 1} (role "{message["role"]}")'


def _check_written(whose: str, values: dict[str, Any], written: str) -> None:
    """Raise UserError unless all that a message or record says is written: as it is, or as in JSON.

    Templates trim spaces. Of tools and of calls the names are looked for, since templates differ in all else.

    Args:
        whose: the message in words.
        values: by key.
        written: see `_without_spaces`.
    """
    for key, value in values.items():
        if key in _NOT_WRITTEN:
            continue
        for text in _names(value) if key in _CALLS else [value]:
            as_json = json.dumps(text, ensure_ascii=False, default=str)
            forms = (text, as_json[1:-1]) if isinstance(text, str) else (as_json,)
            if not any(_without_spaces(form) in written for form in forms):
                raise UserError(
                    f'the chat template leaves out or changes "{key}" of {whose}; use a template that writes it '
                    "as it is, or leave it out of the data"
                )


def _names(value: Any) -> list[Any]:
    """Return the names of tools or of calls, or of a call; what is none of them as it is."""
    calls = value if isinstance(value, list) else [value]
    functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    return [one.get("name", "") if isinstance(one, dict) else one for one in functions]


def _without_spaces(text: str) -> str:
    for space in " \n\t":  # so that few parts remain, each of which takes 50 bytes
        text = text.replace(space, "")
    return "".join(text.split())
