"""Training reads the tokens that generation reads before an answer, and learns every token of the answer."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_noloco.data.auto_tokenizer import load_folder
from megatron_noloco.data.opening import open_data
from megatron_noloco.data.sources import Needs, RecordSource, Split
from megatron_noloco.data.tokenizer import ByteTokenizer
from tests.kit.chats import write
from tests.kit.datasets import Learnt, load_records
from tests.kit.tokenizers import tokenizer_at

TEXT = [
    "The fox went.\n\n\nLabel: red\n\nLabel: blue  the   end",
    "def fox(the):\n    return the\n",
    "USER: fox 0\n\n",
]
WORDS = ["fox", " the", "the", "\n\n", "  ", "Label: ", "red", "23", "ing", *"\n :1.é日🙂"]
PLACES = list[Path]()  # for files; hypothesis permits no fixture of a test
SPECIAL = ["<s>", "</s>", "<unk>"]
GPT4 = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}USER: {{ message.content }}\n"
    "{% else %}ASSISTANT: {{ message.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens of a prompt as `generate` has transformers read them."""
    has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
    tokens: list[int] = tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"]
    return tokens


def byte_level(prefix: bool, *before: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not before)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(model: Any, scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def llama_2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def bpe_with_bytes() -> Any:
    return models.BPE(unk_token="<unk>", byte_fallback=True)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": lambda: byte_level(False),
    "GPT-4": lambda: byte_level(False, pre_tokenizers.Split(GPT4, "isolated")),
    "a space before each text": lambda: byte_level(True),
    "Llama 2": llama_2,
    "SentencePiece": lambda: sentencepiece(bpe_with_bytes(), "always"),
    "SentencePiece, first": lambda: sentencepiece(bpe_with_bytes(), "first"),
    "SentencePiece, never": lambda: sentencepiece(bpe_with_bytes(), "never"),
    "Unigram": lambda: sentencepiece(models.Unigram(), "always"),
    "WordPiece": word_piece,
}
TRAINERS: dict[type, Callable[[], Any]] = {
    models.BPE: lambda: trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
    models.Unigram: lambda: trainers.UnigramTrainer(
        vocab_size=100, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    ),
    models.WordPiece: lambda: trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=SPECIAL, show_progress=False
    ),
}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> None:
    PLACES.append(tmp_path_factory.mktemp("answers"))


@cache
def made(kind: str, bos: bool) -> tuple[Any, Any]:
    """Return a tokenizer, and what transformers loads from its export."""
    folder, tokenizer = Path(mkdtemp(dir=PLACES[-1])), KINDS[kind]()
    tokenizer.train_from_iterator(TEXT * 20, TRAINERS[type(tokenizer.model)]())
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    ours = tokenizer_at(folder, prepend_bos=bos)
    ours.save(folder / "exported", 100)
    return ours, load_folder(folder / "exported")


def without_chat_format(tokenizer: Any) -> Any:
    """Return the tokenizer with a template that writes messages only."""
    folder = Path(mkdtemp(dir=PLACES[-1]))
    for file in Path(tokenizer.folder).glob("*.json"):
        shutil.copy(file, folder)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return tokenizer_at(folder, prepend_bos=bool(tokenizer.before_document))


texts = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)
kinds = pytest.mark.parametrize("kind", KINDS)


def load(tokenizer: Any, *records: Any) -> list[Learnt]:
    return load_records(write(Path(mkdtemp(dir=PLACES[-1])) / "a.jsonl", *records), tokenizer)


@kinds
@pytest.mark.parametrize("bos", [False, True], ids=["", "BOS"])
@settings(max_examples=60, deadline=None)
@given(texts, texts)
def test_a_completion_follows_the_tokens_that_generation_reads(
    kind: str, bos: bool, prompt: str, completion: str
) -> None:
    ours, theirs = made(kind, bos)
    (record,) = load(ours, {"prompt": prompt, "completion": completion})
    first = int(record.answer.argmax())
    assert record.answer[first:].all()
    assert not record.answer[:first].any()
    assert record.tokens[-1] == ours.end_of_document
    assert ours.decode(record.tokens) == ours.decode(ours.encode(prompt + completion))
    if record.joined:
        assert kind == "WordPiece", "an unknown word is one token"
    else:
        begin = prompt_tokens(theirs, prompt) or [ours.end_of_document]
        assert record.tokens[:first].tolist() == begin


@kinds
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_chat_turns_follow_generation_tokens(kind: str, turns: list[tuple[str, str]]) -> None:
    ours, theirs = made(kind, True)
    messages: list[dict[str, str]] = []
    expected = []
    for question, answer in turns:
        messages.append({"role": "user", "content": f"{question}?"})
        prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected.append((prompt_tokens(theirs, prompt), f"{answer}</s>\n"))
        messages.append({"role": "assistant", "content": answer})
    records = load(ours, {"messages": messages})
    assert [record.begins for record in records] == [True] + [False] * (len(records) - 1)
    found = [(record.tokens, stretch) for record in records for stretch in stretches(record.answer)]
    assert len(found) == len(turns)
    if not records[0].joined:
        for (tokens, (first, stop)), (prompt, answer) in zip(found, expected, strict=True):
            assert tokens[:first].tolist() == prompt
            end = ours.decode(ours.encode_batch([answer], True)[0]).lstrip()
            assert ours.decode(tokens[:stop]).endswith(end)


def stretches(answer: np.ndarray) -> list[tuple[int, int]]:
    """Return where stretches that have a loss begin and end."""
    edges = np.flatnonzero(np.diff([0, *answer.astype(int), 0]))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def test_edges_of_template_and_answer_are_encoded_apart() -> None:
    """A space and a word, two line feeds, a later turn that reads an earlier answer as other tokens."""
    ours, _ = made("GPT-4", False)
    assert len(ours.encode(" red")) < len(ours.encode(" ")) + len(ours.encode("red"))
    assert len(ours.encode("\n\n")) == 1
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "red"}]
    records = load(
        ours,
        {"prompt": "Label: ", "completion": "red"},
        {"prompt": "Label:\n", "completion": "\nred"},
        {"messages": chat},
        {"messages": chat * 2},
    )
    learnt = [ours.decode(record.tokens[record.answer]) for record in records]
    assert learnt == ["red", "\nred", "red\n", "red\n", "red\n"]
    assert [record.begins for record in records] == [True] * 4 + [False]


def test_what_is_not_as_in_generation_is_counted() -> None:
    word_piece, space = made("WordPiece", False)[0], made("GPT-2", False)[0]
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "red"}]
    needs, split = Needs(1000, 64, evaluates=False), Split.parse("1")
    folder = Path(mkdtemp(dir=PLACES[-1]))
    path = write(folder / "a.jsonl", {"prompt": "fox", "completion": "1"}, {"messages": chat})
    summary = open_data(RecordSource(path, split, max_lost=1.0), word_piece, needs).summary
    assert "; answers that begin within a token of the prompt: 1, which generation reads apart" in summary
    path = write(folder / "b.jsonl", {"messages": chat * 3}, {"messages": chat})
    summary = open_data(RecordSource(path, split), space, needs).summary
    assert "2 records, " in summary
    note = "later turns in samples of their own: 2, since the template writes earlier answers otherwise"
    assert summary.endswith(note)
    halves = RecordSource(path, Split.parse("1,1"), packed=False)
    built = open_data(halves, space, Needs(1000, 64))
    sizes = [len(part) for part in (*built.training.parts, *built.validation.parts)]
    assert sizes == [3, 1], "a chat is not divided"


def test_special_tokens_that_a_record_spells_out_are_there_once() -> None:
    """Where they are tokens; otherwise they are text, and those of a record are added."""
    named, written = made("GPT-2", True)[0], {"prompt": "<s>fox", "completion": "red</s>"}
    begin, end = named.special_tokens["<s>"], named.special_tokens["</s>"]
    for splits in (False, True):
        (record,) = load(tokenizer_at(named.folder, splits, True), written)
        assert [(record.tokens == token).sum() for token in (begin, end)] == [1, 1]
        assert record.tokens[0] == begin
        assert record.tokens[-1] == end
    (record,) = load(named, {"prompt": "fox", "completion": ""})
    assert record.tokens[record.answer].tolist() == [end]


def test_bytes_are_never_joined() -> None:
    (record,) = load(ByteTokenizer(), {"prompt": "Größe: ", "completion": "\nzwölf"})
    assert record.tokens[record.answer].tolist() == [*"\nzwölf".encode(), ByteTokenizer.end_of_document]


@kinds
@pytest.mark.parametrize("bos", [False, True], ids=["", "BOS"])
def test_answer_to_empty_prompt_follows_generation_start(kind: str, bos: bool) -> None:
    ours, _ = made(kind, bos)
    bare = [{"role": "user", "content": ""}, {"role": "assistant", "content": "red"}]
    (record,) = load(ours, {"prompt": "", "completion": "red"})
    answer = [*ours.encode("red").tolist(), ours.end_of_document]
    assert record.tokens.tolist() == [*(ours.before_document or [ours.end_of_document]), *answer]
    assert record.tokens[record.answer].tolist() == answer
    (of_chat,) = load(without_chat_format(ours), {"messages": bare})
    assert of_chat.tokens[of_chat.answer].tolist() == ours.encode("red").tolist()
