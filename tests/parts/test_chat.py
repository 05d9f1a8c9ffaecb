"""Conversations: what messages may hold, what has a loss, and what a chat template must write of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megatron_noloco.data.chat import Answer, ChatTemplate, answers_of
from megatron_noloco.data.records import without_nulls
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from tests.kit.chats import ANSWER, ASKED, CALLS, CHAT, TEMPLATE, answers, called, chat_tokenizer, write
from tests.kit.datasets import Learnt, load_records
from tests.kit.golden import check
from tests.kit.tokenizers import tokenizer_at

PUBLISHED = sorted((Path(__file__).parents[1] / "chat_templates").glob("*.jinja"))
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}]
DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + TEMPLATE


def load(folder: Path, template: str, *conversations: Any, **others: Any) -> list[Learnt]:
    tokenizer = tokenizer_at(chat_tokenizer(folder / "tokenizer", template))
    path = write(folder / "a.jsonl", *({"messages": messages, **others} for messages in conversations))
    return load_records(path, tokenizer)


def template_of(folder: Path, text: str) -> ChatTemplate:
    """A template whose tokenizer has BOS and EOS."""
    chat_tokenizer(folder, text)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return tokenizer_at(folder).chat_template


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of messages of each rendering."""
    found, render = list[int](), ChatTemplate.render

    def counting(template: ChatTemplate, messages: Any, *rest: Any, **options: Any) -> str:
        found.append(len(messages))
        return render(template, messages, *rest, **options)

    monkeypatch.setattr(ChatTemplate, "render", counting)
    return found


TURNS = [ASKED, ANSWER, {"role": "user", "content": "five"}, {"role": "assistant", "content": " six"}]
THOUGHT = [
    {**message, "content": f"<think>\nwhy\n</think>\n\n{message['content']}"} for message in TURNS[1::2]
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "two turns": TURNS,
    "a system message": [CHAT[0], *TURNS],
    "thoughts": [ASKED, THOUGHT[0], TURNS[2], THOUGHT[1]],
    "a tool call, arguments as an object": called({"city": "Köln"}),
    "a tool call, arguments as JSON text": called('{"city": "Köln"}'),
}


def in_full(lists: list[list[Answer]]) -> Iterator[tuple[str, str]]:
    """Yield all text before each answer, and its own."""
    for answers_of_list in lists:
        through = ""
        for before, text in answers_of_list:
            yield through + before, text
            through += before + text


def test_published_templates_train_or_say_why_not(tmp_path: Path) -> None:
    """Of each answer the end of the text before it, and its own: tests/golden/chat_templates.txt."""

    def cases() -> Iterator[tuple[str, str]]:
        for file in PUBLISHED:
            template = template_of(tmp_path / file.stem, file.read_text())
            tools = TOOLS if "tools" in file.read_text() else None
            for name, messages in CONVERSATIONS.items():
                try:
                    found, _ = answers_of(
                        without_nulls(messages), tools if "tool" in name else None, template
                    )
                    said = "\n".join(f"...{before[-40:]!r} {text!r}" for before, text in in_full(found))
                except UserError as error:
                    said = f"refused: {error}"
                yield f"{file.stem}: {name}", said

    check("chat_templates", cases())


@pytest.mark.parametrize(
    "file", [file for file in PUBLISHED if file.stem != "deepseek-r1"], ids=lambda file: file.stem
)
def test_each_answer_follows_what_generation_reads(file: Path, tmp_path: Path) -> None:
    """Though turns are rendered apart where a template writes them alike wherever they stand.

    An answer ends as it does before other messages, without an EOS that stands after the last one only.
    """
    template = template_of(tmp_path, file.read_text())
    messages = [{**message, "content": f"{message['content']} {n}"} for n in range(4) for message in TURNS]
    found, whole = [*in_full(answers_of(messages, None, template)[0])], template.render(messages)
    assert len(found) == 8
    for place, (before, text) in zip(range(1, len(messages), 2), found, strict=True):
        assert before == template.render(messages[:place], add_generation_prompt=True)
        through = template.render(messages[: place + 1])
        without_eos = through.removesuffix("<end>")
        lacks_eos = whole.startswith(without_eos) and not whole.startswith(through)
        assert before + text == (without_eos if lacks_eos else through)


@pytest.mark.parametrize(
    ("template", "lists"),
    [
        ("<{{ m.role }}>{{ m.content }}<stop>", 1),
        ("<{{ m.role }}>{{ m.content }}\n", 4),
        ("<{{ m.role }}>{{ m.content }}{{ eos_token }}", 1),
    ],
)
def test_each_answer_has_an_end(template: str, lists: int, tmp_path: Path) -> None:
    """Where EOS after the last message is the only one, each answer is learnt with it, apart from the others."""
    text = (
        f"{{% for m in messages %}}{template}{{% endfor %}}"
        "{{ '<assistant>' if add_generation_prompt else eos_token }}"
    )
    found, _ = answers_of(2 * TURNS, None, template_of(tmp_path, text))
    assert len(found) == lists
    for answers_of_list in found:
        *earlier, (_, last) = answers_of_list
        assert last.endswith("<end>")
        assert all(answer.endswith(("<stop>", "<end>")) for _, answer in earlier)


@pytest.mark.parametrize(
    "file",
    [file for file in PUBLISHED if file.stem not in ("deepseek-r1", "qwen3")],
    ids=lambda file: file.stem,
)
def test_few_messages_are_rendered(file: Path, tmp_path: Path, rendered: list[int]) -> None:
    template = template_of(tmp_path, file.read_text())
    assert len(answers_of(32 * TURNS, None, template)[0]) == 1
    assert sum(rendered) < 8 * len(32 * TURNS)


@pytest.mark.parametrize("turns", [8, 64])
def test_the_work_grows_with_the_messages(
    turns: int, tmp_path: Path, rendered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with their square: what is rendered, and what is encoded."""
    encoded, encode = list[int](), Tokenizer.encode_batch

    def counting_encode(tokenizer: Tokenizer, texts: list[str], *rest: Any, **options: Any) -> list[Any]:
        encoded.extend(map(len, texts))
        return encode(tokenizer, texts, *rest, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", counting_encode)
    (record,) = load(tmp_path, TEMPLATE, TURNS * (turns // 2))
    assert sum(rendered) < 8 * 2 * turns
    assert sum(encoded) < 8 * 40 * turns
    tokenizer = tokenizer_at(tmp_path / "tokenizer")
    whole = tokenizer.chat_template.render(TURNS * (turns // 2))
    assert record.tokens.tolist() == tokenizer.encode_batch([whole], True)[0].tolist()


def test_turns_of_qwen3_are_learnt_as_generation_reads_them(tmp_path: Path) -> None:
    """Each answer with its empty thoughts, after earlier answers without: two sequences of tokens."""
    qwen3 = next(file for file in PUBLISHED if file.stem == "qwen3").read_text()
    first, second = load(tmp_path, qwen3, TURNS)
    tokenizer = tokenizer_at(tmp_path / "tokenizer")
    assert answers(first, tokenizer).startswith("<think>\n\n</think>\n\nthree four")
    assert answers(second, tokenizer).startswith("<think>\n\n</think>\n\n six")
    assert tokenizer.decode(second.tokens).count("<think>") == 1
    assert (first.begins, second.begins) == (True, False)


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


def test_a_single_call_is_what_the_template_makes_of_it(tmp_path: Path) -> None:
    """As templates of 2023 have it; a template that leaves it out is refused."""
    call = {"role": "assistant", "function_call": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    template = TEMPLATE.replace("<end>", "{{ message.function_call.name }}<end>")
    (record,) = load(tmp_path, template, [ASKED, call])
    assert answers(record, tokenizer_at(tmp_path / "tokenizer")) == "weather\n"
    with pytest.raises(ValueError, match='leaves out or changes "function_call" of message 2'):
        load(tmp_path, TEMPLATE, [ASKED, call])


def test_arguments_that_are_no_json_stay_text(tmp_path: Path) -> None:
    (record,) = load(tmp_path, CALLS, called("city: Ulm"))
    assert answers(record, tokenizer_at(tmp_path / "tokenizer")).startswith('weather"city: Ulm"')


def test_an_answer_of_weight_0_is_read_without_a_loss(tmp_path: Path) -> None:
    weighted = [
        {**message, "weight": 0} if message["content"] == "three four" else message for message in CHAT
    ]
    weighted[-1] = {**weighted[-1], "weight": 1}
    one, other = load(tmp_path, TEMPLATE, CHAT, weighted)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert answers(other, tokenizer_at(tmp_path / "tokenizer")) == "six\n"


def test_a_template_may_trim(tmp_path: Path) -> None:
    trimming = TEMPLATE.replace("message['content']", "message['content'] | trim")
    load(tmp_path, trimming, [{**ASKED, "content": " two\n"}, {**ANSWER, "content": "\n"}])


@pytest.mark.parametrize("written", ["| tojson", "", "| string"])
def test_arguments_have_the_form_that_a_template_takes(written: str, tmp_path: Path) -> None:
    """One that writes them as JSON takes an object, any other their JSON text."""
    template = CALLS.replace("arguments | tojson", f"arguments {written}")
    given = (called({"city": "Köln"}), called('{"city": "Köln"}'))
    for record in load(tmp_path, template, *given):
        assert 'weather{"city": "Köln"}' in answers(record, tokenizer_at(tmp_path / "tokenizer"))


def test_parquet_has_the_keys_of_a_row_only(tmp_path: Path) -> None:
    """Its objects have the keys of all rows, null where a row lacks them; maps are objects, tools may be text."""
    tokenizer = tokenizer_at(chat_tokenizer(tmp_path / "tokenizer", "{{ tools | tojson }}" + CALLS))
    records = [
        {"messages": called(arguments), "tools": [{"name": "f", "parameters": {name: {"type": "text"}}}]}
        for name, arguments in (("city", {"city": "Ulm"}), ("day", {"day": "1"}), ("no", {}))
    ]
    lines = load_records(write(tmp_path / "a.jsonl", *records), tokenizer)
    as_text = [record | {"tools": json.dumps(record["tools"])} for record in records]
    texts = load_records(write(tmp_path / "b.jsonl", *as_text), tokenizer)
    assert [row.tokens.tolist() for row in texts] == [line.tokens.tolist() for line in lines]
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


def test_a_template_that_asks_for_the_date_gets_one_date(tmp_path: Path) -> None:
    (record,) = load(tmp_path, DATED, [ASKED, ANSWER])
    assert tokenizer_at(tmp_path / "tokenizer").decode(record.tokens).startswith("01 Jan 2025<user>")
