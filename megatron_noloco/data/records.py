"""Records for fine-tuning: prompts and answers; only the tokens of answers have a loss."""

import json
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

import numpy as np

from megatron_noloco.data.chat import Answer, ChatTemplate, answers_of
from megatron_noloco.data.encode import ROLES, Counts, encode_each, in_groups, read_ahead
from megatron_noloco.data.formats import Input
from megatron_noloco.data.indexed import Sequence
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError, prefix_errors_with
from megatron_noloco.files import check_whole_characters

RECORD_KEYS = "messages", "prompt", "conversations", "instruction", "question"  # of which a record has one
_ROLES = {"human": "user", "gpt": "assistant"}  # of conversations
# What programs read of a record; here some are no part of the text
_READ = "prompt", "completion", "tools", "system", "history", "functions", "documents", "chat_template_kwargs"
# Texts after which answers are encoded; none is joined with every other text.
_ANCHORS = ("", "\n", "a", "0", ".")


class _Record(NamedTuple):
    """One line of a file, as the texts of its answers."""

    lists: list[list[Answer]]  # see `answers_of`
    empty: int  # answers without any text
    from_template: bool  # which ends an answer; otherwise an end-of-document token does, as a part of it
    texts: list[str]  # the texts of the line from which its tokens are made
    file: str


def encode_records(inputs: Iterable[Input], tokenizer: Tokenizer, counts: Counts) -> Iterator[Sequence]:
    """Yield what is learnt of each record, in the order of the lines; a record is a document.

    A record is a JSON object with `messages` or with `prompt` and `completion`. The tokenizer's chat template
    renders messages, whose answers are those of the role "assistant"; otherwise the completion is the answer.
    Raises UserError that names file and line of the first line that is not a record.
    """
    records = (record for item in inputs for record in _read(item, tokenizer.chat_template, counts))
    alike = (group for _, group in groupby(records, key=lambda record: record.from_template))
    groups = (group for same in alike for group in in_groups(same, lambda one: sum(map(len, one.texts))))
    for group in read_ahead(groups):
        from_template = group[0].from_template
        pairs = [(text, record.file) for record in group for text in record.texts]
        counts.count_texts(pairs, tokenizer, from_template)
        if from_template and tokenizer.end_of_answer is None:
            counts["endless"] += sum(len(answers) for record in group for answers in record.lists)
        lists = (answers for record in group for answers in record.lists)
        parts = chain.from_iterable(_parts(answers, tokenizer, from_template) for answers in lists)
        encoded = encode_each(parts, tokenizer, from_template)
        for record in group:
            learnt = [
                sequence
                for answers in record.lists
                for sequence in _encode(answers, encoded, from_template, tokenizer, counts)
            ]
            counts["records"] += 1
            counts["empty_answers"] += record.empty
            counts["learnt_apart"] += len(learnt) - 1
            for place, (tokens, answer) in enumerate(learnt, 1):
                yield Sequence(tokens, place == len(learnt), answer)


def _parts(answers: list[Answer], tokenizer: Tokenizer, from_template: bool) -> Iterator[str]:
    """Yield four texts of each answer: what is before the last border and after it, twice, see `split_at_border`.

    First of the text before the answer, since the last border that is known; then of the rest with the answer. So
    only what follows a border is encoded again, not a conversation for each of its answers.
    """
    known = ""
    for before, answer in answers:
        asked, rest = tokenizer.split_at_border(known + before, from_template)
        answered, known = tokenizer.split_at_border(rest + answer, from_template)
        yield from (asked, rest, answered, known)


def _encode(
    answers: list[Answer],
    encoded: Iterator[np.ndarray],
    from_template: bool,
    tokenizer: Tokenizer,
    counts: Counts,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return what is learnt of answers: tokens, and whether each belongs to an answer.

    Each answer follows the tokens that generation reads before it. A later answer needs a sequence of its own if
    its prompt does not begin with the tokens of the answers before it.

    Args:
        encoded: the tokens of what `_parts` yields of them.
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    earlier = tokenizer.encode("")
    for answer in answers:
        asked, rest, answered, known = islice(encoded, 4)
        earlier = np.append(earlier, asked)
        begin, tokens = _apart(rest, np.append(answered, known), answer.text, tokenizer, from_template)
        counts["joined"] += begin is not rest
        end = tokenizer.end_of_document  # which a completion may spell out
        if not from_template and tokens[-1:].tolist() != [end]:
            tokens = np.append(tokens, tokens.dtype.type(end))
        before = np.append(earlier, begin)
        learnt = np.repeat([False, True], [len(before), len(tokens)])
        if found and _begins_with(before, found[-1][0]):
            _, learnt_before = found.pop()
            learnt[: len(learnt_before)] = learnt_before
        found.append((np.append(before, tokens), learnt))
        earlier = np.append(earlier, answered)
    return [_with_beginning(tokens, learnt, tokenizer) for tokens, learnt in found]


def _with_beginning(
    tokens: np.ndarray, answer: np.ndarray, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Put BOS before tokens that need it, or the end of another document before an answer to nothing."""
    begin = tokenizer.before_document
    lead = begin
    if not begin and answer[0]:  # after the end of another document, where generation begins, too
        lead = (tokenizer.end_of_document,)
    elif tuple(tokens[: len(begin)]) == begin:  # a template may write it itself
        lead = ()
    return np.insert(tokens, 0, lead), np.insert(answer, 0, [False] * len(lead))


def _apart(
    prompt: np.ndarray, whole: np.ndarray, answer: str, tokenizer: Tokenizer, from_template: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens before an answer, which are those of the prompt where possible, and its own.

    An answer has its tokens after the prompt, or where the tokenizer joins both, after another text. Texts are
    compared, since a tokenizer may begin each text with a space, or letters after others with a mark. Where no
    tokens of its own make up the answer, it begins with the first token that the prompt alone does not have.

    Args:
        whole: the tokens of prompt and answer together.
    """
    if _begins_with(whole, prompt):
        return prompt, whole[len(prompt) :]
    text = tokenizer.decode(whole)
    for anchor in _ANCHORS:
        alone, tokens = tokenizer.encode_batch([anchor, anchor + answer], from_template)
        tokens, found = tokens[len(alone) :], _begins_with(tokens, alone)
        if found and tokenizer.decode(np.append(prompt, tokens)) == text:
            return prompt, tokens
    length = min(len(prompt), len(whole))
    same = int(np.logical_and.accumulate(prompt[:length] == whole[:length]).sum())
    return whole[:same], whole[same:]


def _begins_with(tokens: np.ndarray, first: np.ndarray) -> bool:
    return np.array_equal(tokens[: len(first)], first)


def _read(item: Input, template: ChatTemplate, counts: Counts) -> Iterator[_Record]:
    for place, content in item.rows(counts.advance):
        with prefix_errors_with(place):
            record = _record_of(without_nulls(content), item.name, template, counts)
        yield record


def without_nulls(value: Any) -> Any:
    """Leave out the keys that are null: tables and datasets write one for each key that another row has."""
    if isinstance(value, dict):
        return {key: without_nulls(held) for key, held in value.items() if held is not None}
    return list(map(without_nulls, value)) if isinstance(value, list) else value


def _strings(value: Any) -> Iterator[str]:
    """Yield each text in a part of a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for held in value.values() if isinstance(value, dict) else value:
            yield from _strings(held)


def _with_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the keys of ShareGPT, Alpaca, Dolly or GSM8K with messages; any other as it is."""
    match row:
        case {"messages": _}:
            return row
        case {"conversations": [{"from": _, "value": _}, *_] as said}:
            messages = [_message_of(one) for one in said]
        case (
            {"instruction": str(asked), "output": str(answer)}
            | {"instruction": str(asked), "response": str(answer)}
            | {"question": str(asked), "answer": str(answer)}
        ):
            more = (row.get("input") or row.get("context") or "") if "instruction" in row else ""
            question = {"role": "user", "content": f"{asked}\n{more}" if more else asked}
            messages = [question, {"role": "assistant", "content": answer}]
        case _:
            return row
    return row | {"messages": messages}


def is_record(row: dict[str, Any]) -> bool:
    """Return whether a row is a record, sound or not; one that also has a text is if it is sound in its keys."""
    given = _with_messages(without_nulls(row))
    has_all = "messages" in given or {"prompt", "completion"} <= given.keys()
    return has_all or ("text" not in row and not row.keys().isdisjoint(RECORD_KEYS))


def _message_of(said: Any) -> Any:
    """Return what one side of a conversation said as a message."""
    match said:
        case {"from": str(who), "value": text}:
            return {"role": _ROLES.get(who, who), "content": text}
    return said


def _record_of(row: dict[str, Any], file: str, template: ChatTemplate, counts: Counts) -> _Record:
    row = _with_messages(row)
    match row:
        case {"weight": weight} if weight != 1:
            raise UserError(f'"weight" {weight!r} of a whole record; give it to a message that is an answer')
        case {"completion": _, "label": bool()}:
            raise UserError(
                '"label" says whether the completion is wanted, and every completion would be learnt; leave out '
                "the rows of unwanted ones, and the key"
            )
        case {"messages": [_, *_] as messages}:
            read = ["messages", "tools"]
        case {"prompt": [_, *_] as prompt, "completion": [_, *_] as completion}:
            before = [{**one, "weight": 0} if isinstance(one, dict) else one for one in prompt]
            messages, read = [*before, *completion], ["prompt", "completion", "tools"]
        case {"prompt": str(), "completion": str()}:
            messages, read = [], ["prompt", "completion"]
        case _:
            raise UserError(
                f"{json.dumps(row, default=str)[:60]} (keys: {', '.join(row)}) is no record: it needs "
                '"messages", a list of objects with "role" and "content"; or "prompt" and "completion", both text '
                "or both lists of messages; or the keys of Alpaca, Dolly, GSM8K or ShareGPT (docs/data.md)"
            )
    for key in _READ:
        if row.get(key) and key not in read and not _is_among(row[key], messages):
            raise UserError(f'"{key}" is no part of the text, which {" and ".join(read)} are; leave it out')
    content = [messages, row.get("tools")] if messages else [row["prompt"], row["completion"]]
    check_whole_characters(json.dumps(content, ensure_ascii=False, default=str))
    if messages:
        lists, empty = answers_of(messages, row.get("tools"), template)
        counts.roles.update(role for message in messages if (role := message["role"]) not in ROLES)
    else:
        lists, empty = [[Answer(*content)]], int(not content[1].strip())
    return _Record(lists, empty, bool(messages), [*_strings(content)], file)


def _is_among(value: Any, messages: list[Any]) -> bool:
    """Return whether a value, text or messages, says what some of the messages say."""
    if isinstance(value, list):
        return all(message in messages for message in value)
    return any(isinstance(message, dict) and message.get("content") == value for message in messages)
