"""Conversations: what messages may hold, what has a loss, and what a chat template must write of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megatron_noloco.data.fast_tokenizer import FastTokenizer
from tests.unit.datasets import Learnt, load_records
from tests.unit.test_records import CHAT, TEMPLATE, answers, chat_tokenizer, write

ASKED, ANSWER = {"role": "user", "content": "two"}, {"role": "assistant", "content": "three four"}
CALLS = TEMPLATE.replace(
    "{{ message['content'] }}",
    "{{ message.content | tojson if message.role == 'tool' else message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}",
)
DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + TEMPLATE


def called(arguments: Any) -> list[dict[str, Any]]:
    """A conversation in which the assistant calls a tool, whose answer holds quotes and a new line."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "1", "content": '{"sky":\n "blue"}'},
        ANSWER,
    ]


def load(folder: Path, template: str, *conversations: Any, **others: Any) -> list[Learnt]:
    tokenizer = FastTokenizer(chat_tokenizer(folder / "tokenizer", template))
    path = write(folder / "a.jsonl", *({"messages": messages, **others} for messages in conversations))
    return load_records(path, tokenizer)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "image_url": None} for text in texts]


def test_parts_are_the_text_that_they_make_up(tmp_path: Path) -> None:
    in_parts = [{**ASKED, "content": parts("t", "wo")}, {**ANSWER, "content": parts("three four")}]
    one, other = load(tmp_path, TEMPLATE, [ASKED, ANSWER], in_parts)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.answer.tolist() == other.answer.tolist()


def test_keys_that_hold_nothing_are_passed_over(tmp_path: Path) -> None:
    nothing = {"name": None, "tool_calls": [], "thoughts": "", "function_call": {}, "audio": None}
    in_record = {"prompt": None, "completion": None, "weight": None, "tools": []}
    one, other = load(
        tmp_path, TEMPLATE, [ASKED, ANSWER], [{**ASKED, **nothing}, {**ANSWER, **nothing}], **in_record
    )
    assert one.tokens.tolist() == other.tokens.tolist()


def test_an_answer_of_weight_0_is_read_without_a_loss(tmp_path: Path) -> None:
    weighted = [
        {**message, "weight": 0} if message["content"] == "three four" else message for message in CHAT
    ]
    weighted[-1] = {**weighted[-1], "weight": 1}
    one, other = load(tmp_path, TEMPLATE, CHAT, weighted)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert answers(other, FastTokenizer(tmp_path / "tokenizer")) == "six\n"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ({"role": "assistant", "text": "a"}, 'message 2 has the key "text", which the chat template does'),
        ({**ANSWER, "thoughts": "a"}, 'message 2 has the key "thoughts", which .* there may be role,'),
        ({**ANSWER, "tool_calls": [1]}, 'message 2 has the key "tool_calls", which the chat template does'),
        ({"role": "assistant", "text": None}, 'message 2 has no "content"$'),
        ({"role": "assistant", "content": []}, 'message 2 has no "content"$'),
        ({"role": "assistant", "content": {"a": 1}}, 'message 2: "content" must be text or a list of'),
        (
            {"role": "assistant", "content": [*parts("a"), {"type": "image_url", "image_url": "b"}]},
            r'message 2: a part of "content" must be {"type": "text", "text": "..."}, not {"type": "image_url", ',
        ),
        ({**ANSWER, "weight": 0.5}, 'message 2: "weight" must be 0 or 1, not 0.5$'),
        ({**ASKED, "weight": 1}, 'message 2: "weight" 1 on the role "user", but only answers'),
        ({**ANSWER, "weight": 0}, "each answer has weight 0: there is nothing to learn$"),
    ],
)
def test_what_no_message_may_hold_is_named_in_one_line(message: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: {line}") as caught:
        load(tmp_path, TEMPLATE, [ASKED, ANSWER], [ASKED, message])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "tools", "line"),
    [
        (TEMPLATE, "[]", "must be a list of objects"),
        (TEMPLATE, [{"name": "f"}], "does not read"),
        ("{{ messages[0].tools }}" + TEMPLATE, [{"name": "f"}], "does not read"),  # as in Phi-4-mini
    ],
)
def test_tools_that_would_be_left_out_are_refused(
    template: str, tools: Any, line: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f'line 1: .*"tools".* {line}'):
        load(tmp_path, template, [ASKED, ANSWER], tools=tools)


def test_a_key_that_a_template_reads_elsewhere_is_refused(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    with pytest.raises(ValueError, match='line 1: message 1 has the key "tools", which the chat template'):
        load(tmp_path, template, [{**ASKED, "tools": [{"name": "f"}]}, ANSWER])


@pytest.mark.parametrize(
    ("written", "messages", "left_out"),
    [
        ("message['content'] if message.role != 'system'", CHAT, 'in message 1 .role "system".; use a'),
        (
            "message['content'] if message.role != 'user'",
            [{**ASKED, "content": "three four"}, ANSWER],
            "in message 1",
        ),
        (
            "message['content'].split('</think>')[-1]",
            [ASKED, {**ANSWER, "content": "a</think>b"}],
            "in message 2",
        ),
        ("message.content | upper", [ASKED, ANSWER], "in message 1"),
    ],
)
def test_a_template_must_write_each_text(written: str, messages: Any, left_out: str, tmp_path: Path) -> None:
    template = TEMPLATE.replace("message['content']", written)
    line = f'the chat template leaves out or changes the text of "content" {left_out}'
    with pytest.raises(ValueError, match=line):
        load(tmp_path, template, messages)


def test_template_may_trim_and_write_tool_answers(tmp_path: Path) -> None:
    trimming = TEMPLATE.replace("message['content']", "message['content'] | trim")
    load(tmp_path, trimming, [{**ASKED, "content": " two\n"}, {**ANSWER, "content": "\n"}])
    (record,) = load(tmp_path, CALLS, called({"city": "Köln"}))
    assert '{"city": "Köln"}' in answers(record, FastTokenizer(tmp_path / "tokenizer"))


def test_arguments_of_tool_calls_are_not_escaped_twice(tmp_path: Path) -> None:
    line = '"arguments" in message 2 .role "assistant".; .*or give them as an object$'
    with pytest.raises(ValueError, match=line):
        load(tmp_path, CALLS, called(json.dumps({"city": "Köln"})))


def test_parquet_has_the_keys_of_a_row_only(tmp_path: Path) -> None:
    """Its objects have the keys of all rows, of which those of others are null; and its maps are objects."""
    tokenizer = FastTokenizer(chat_tokenizer(tmp_path / "tokenizer", "{{ tools | tojson }}" + CALLS))
    records = [
        {"messages": called(arguments), "tools": [{"name": "f", "parameters": {name: {"type": "text"}}}]}
        for name, arguments in (("city", {"city": "Ulm"}), ("day", {"day": "1"}), ("no", {}))
    ]
    lines = load_records(write(tmp_path / "a.jsonl", *records), tokenizer)
    table = pyarrow.Table.from_pylist(records)
    of_text = pyarrow.map_(pyarrow.string(), pyarrow.string())
    function = pyarrow.struct([("name", pyarrow.string()), ("arguments", of_text)])
    call = pyarrow.struct([("type", pyarrow.string()), ("function", function)])
    message = [(name, pyarrow.string()) for name in ("role", "content", "name", "tool_call_id")]
    messages = pyarrow.list_(pyarrow.struct([*message, ("tool_calls", pyarrow.list_(call))]))
    maps = pyarrow.array([record["messages"] for record in records], messages)
    for place, of in enumerate((table, table.set_column(0, "messages", maps))):
        parquet.write_table(of, path := tmp_path / f"{place}.parquet")
        rows = load_records(str(path), tokenizer)
        assert [row.tokens.tolist() for row in rows] == [line.tokens.tolist() for line in lines]


def test_a_template_with_a_clock_is_refused_if_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1: the chat template writes the present date"):
        load(tmp_path, DATED, [ASKED, ANSWER])
    fixed = "{% set date = strftime_now('%Y') if date_is_asked else '2025' %}{{ date }}" + TEMPLATE
    assert len(load(tmp_path, fixed, [ASKED, ANSWER])) == 1
