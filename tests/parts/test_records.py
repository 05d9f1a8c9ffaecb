"""Records for fine-tuning: what they become, where the answers are, and how they share samples."""

import gzip
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_noloco.data.corpus import corpus_of
from megatron_noloco.data.indexed import Dataset
from megatron_noloco.data.opening import open_data, open_validation, open_whole
from megatron_noloco.data.record_samples import RecordSamples, pack
from megatron_noloco.data.samples import IGNORED
from megatron_noloco.data.sources import Needs, RecordSource, Split
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer
from tests.kit.chats import CHAT, TEMPLATE, answers, chat_tokenizer, record, stopping_tokenizer, write
from tests.kit.datasets import LFS_POINTER, load_records
from tests.kit.tokenizers import make_tokenizer, tokenizer_at

# The same as TRL's training templates are: what the assistant generates is between marks.
GENERATION = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<end>{{ '\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{{ '\\n' }}{% endif %}{% endfor %}"
)
BYTES = ByteTokenizer()
END = BYTES.end_of_document


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


class TestRecords:
    def test_conversation_has_tokens_of_transformers(self, model: Path, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = tokenizer_at(model)
        (record,) = load_records(write(tmp_path / "a.jsonl", {"messages": CHAT}), tokenizer)
        theirs = AutoTokenizer.from_pretrained(model).apply_chat_template(CHAT, return_dict=True)
        assert record.tokens.tolist() == theirs["input_ids"]
        assert answers(record, tokenizer) == "three four\nsix\n"
        masked = AutoTokenizer.from_pretrained(model).apply_chat_template(
            CHAT, chat_template=GENERATION, return_assistant_tokens_mask=True, return_dict=True
        )
        assert record.answer.tolist() == list(map(bool, masked["assistant_masks"]))
        assert (record.tokens[record.answer] == tokenizer.end_of_document).sum() == 2

    def test_a_folder_may_hold_every_corpus_of_records(self, model: Path, tmp_path: Path) -> None:
        """The same as one file, from Parquet, too, whose rows have the keys of all; other files are named."""
        tokenizer, folder = tokenizer_at(model), tmp_path / "chats"
        folder.mkdir()
        records = [{"messages": CHAT}, {"prompt": "two", "completion": " three"}]
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        for name in ("a.json", "b.jsonl", "c.ndjson"):
            (folder / name).write_bytes(lines)
        (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines))
        rows = [{**dict.fromkeys(("messages", "prompt", "completion")), **record} for record in records]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "e.parquet")
        (folder / "f.jsonl").symlink_to("b.jsonl")
        for name in ("README.md", "x.bz2"):
            (folder / name).write_text("no record")
        (folder / "info.json").write_text(json.dumps({"messages": "as printed"}, indent=1))
        (folder / "y.jsonl").write_bytes(LFS_POINTER)
        found, alone = load_records(str(folder), tokenizer), load_records(str(folder / "b.jsonl"), tokenizer)
        assert [record.tokens.tolist() for record in found] == 5 * [r.tokens.tolist() for r in alone]
        assert [record.answer.tolist() for record in found] == 5 * [r.answer.tolist() for r in alone]
        summary = open_data(source(str(folder), "1"), tokenizer, Needs(300, 64, evaluates=False)).summary
        assert "10 records" in summary
        assert summary.endswith(
            "; left out: 2 files without records (README.md, x.bz2), 1 file of JSON whose first line is no object "
            "with messages, prompt, conversations, instruction, question (info.json), 1 pointer of Git LFS, "
            "`git lfs pull` fetches the files (y.jsonl)"
        )
        samples, notes = open_whole(str(folder), tokenizer, Needs(300, 64))
        assert isinstance(samples, RecordSamples)
        assert summary.endswith(notes)

    def test_prompts_and_completions_of_messages(self, model: Path, tmp_path: Path) -> None:
        """As TRL has them, only the completion is learnt; a prompt beside messages is one of them."""
        tokenizer, last = tokenizer_at(model), {"messages": CHAT}
        in_two = {"prompt": CHAT[:4], "completion": CHAT[4:]}
        beside = last | {"prompt": "two", "completion": CHAT[2:3]}
        path = write(tmp_path / "a.jsonl", last, beside, in_two)
        whole, other, second = load_records(path, tokenizer)
        assert whole.tokens.tolist() == other.tokens.tolist() == second.tokens.tolist()
        assert whole.answer.tolist() == other.answer.tolist()
        assert answers(second, tokenizer) == "six\n"

    @pytest.mark.parametrize(
        ("row", "asked"),
        [
            ({"instruction": "two", "input": "", "output": "six", "text": "all"}, "two"),
            ({"instruction": "two", "input": "five", "output": "six"}, "two\nfive"),
            ({"instruction": "two", "context": "five", "response": "six", "category": "qa"}, "two\nfive"),
            ({"question": "two", "answer": "six"}, "two"),
            ({"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "six"}]}, "two"),
            (
                {
                    "conversations": [
                        {"from": "user", "value": "two"},
                        {"role": "assistant", "content": "six"},
                    ]
                },
                "two",
            ),
        ],
        ids=["Alpaca", "Alpaca with input", "Dolly", "GSM8K", "ShareGPT", "mixed"],
    )
    def test_rows_of_well_known_sets_are_chats(
        self, row: dict[str, Any], asked: str, model: Path, tmp_path: Path
    ) -> None:
        chat = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "six"}]}
        found, meant = load_records(write(tmp_path / "a.jsonl", row, chat), tokenizer_at(model))
        assert found.tokens.tolist() == meant.tokens.tolist()
        assert found.answer.tolist() == meant.answer.tolist()

    def test_one_thread_uses_the_tokenizer(self, model: Path, tmp_path: Path) -> None:
        """Of which special tokens are text for a prompt, and tokens for a chat; another thread reads rows."""
        tokenizer, threads, encode_batch = tokenizer_at(model), set[int](), Tokenizer.encode_batch

        def encode_here(*arguments: Any, **options: Any) -> list[np.ndarray]:
            threads.add(threading.get_ident())
            return encode_batch(*arguments, **options)

        path = write(tmp_path / "a.jsonl", {"messages": CHAT}, {"prompt": "two", "completion": " é"})
        with patch.object(Tokenizer, "encode_batch", encode_here):
            load_records(path, tokenizer)
        assert threads == {threading.get_ident()}

    def test_another_transformers_renders_anew(self, model: Path, tmp_path: Path) -> None:
        plain, path = tmp_path / "plain", write(tmp_path / "a.jsonl", {"messages": CHAT})
        plain.mkdir()
        make_tokenizer(plain)
        for tokenizer, again in ((tokenizer_at(model), True), (tokenizer_at(plain), False), (BYTES, False)):
            recipes = [corpus_of(source(path), tokenizer).recipe for _ in range(2)]
            with patch("megatron_noloco.data.chat.version", lambda _: "99"):
                recipes.append(corpus_of(source(path), tokenizer).recipe)
            digests = [recipe.digest for recipe in recipes]
            assert digests[0] == digests[1]
            assert (digests[0] != digests[2]) == again

    @pytest.mark.parametrize(
        ("end", "token"),
        [
            ("<end>", "<end>"),
            ("<stop>", "<stop>"),
            (" <stop>\n<end>", "<stop>"),
            ("\nUser:", None),
            ("{{ raise_exception('no user here') }}", None),
        ],
    )
    def test_the_token_that_ends_an_answer(self, end: str, token: str | None, tmp_path: Path) -> None:
        tokenizer = tokenizer_at(stopping_tokenizer(tmp_path, TEMPLATE.replace("<end>", end)))
        assert tokenizer.end_of_answer == (token and tokenizer.vocabulary[token])

    def test_without_a_template_no_token_ends_an_answer(self, tmp_path: Path) -> None:
        make_tokenizer(tmp_path)
        assert tokenizer_at(tmp_path).end_of_answer is None


_PREPARE = """
import resource, sys
from megatron_noloco.data.corpus import corpus_of
from megatron_noloco.data.sources import RecordSource, TextSource
from tests.kit.tokenizers import tokenizer_at
tokenizer = tokenizer_at(sys.argv[1])
if tokenizer.content["chat_template"]:
    tokenizer.end_of_answer  # imports transformers
source = (TextSource if sys.argv[2].endswith("txt") else RecordSource)(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus_of(source, tokenizer).make()
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.parametrize("kind", ["text", "chat", "completion"])
def test_a_long_line_takes_little_memory(kind: str, tmp_path: Path) -> None:
    """At most 8 bytes for each of its bytes, and 0.3 GB: tokenizers takes 100 for each that it encodes at once."""
    text = "two three seven \n" * 250_000
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    path = tmp_path / ("a.txt" if kind == "text" else "a.jsonl")
    if kind == "text":
        path.write_text(text.replace("\n", ""))
    else:
        chat = {"messages": [CHAT[1], {"role": "assistant", "content": text}]}
        write(path, chat if kind == "chat" else {"prompt": "two", "completion": text})
    grown = int(subprocess.check_output([sys.executable, "-c", _PREPARE, tokenizer, path]))
    assert grown < 8 * path.stat().st_size + 0.3e9


def test_a_long_answer_is_read_in_pieces(model: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_at(model)
    long = {"messages": [CHAT[1], CHAT[2] | {"content": "three four \n" * 50}]}
    file = write(tmp_path / "a.jsonl", long, {"prompt": "two " * 50, "completion": "three " * 50})
    whole = load_records(file, tokenizer)
    with patch("megatron_noloco.data.encode._LONGEST", 40):
        pieces = load_records(file, tokenizer)
    assert [record.tokens.tolist() for record in pieces] == [record.tokens.tolist() for record in whole]
    assert [record.answer.tolist() for record in pieces] == [record.answer.tolist() for record in whole]


def samples_of(records: list[tuple[np.ndarray, np.ndarray]], packed: bool = True) -> RecordSamples:
    """Samples of 8 tokens, of a part of a dataset that begins at its 5th token."""
    tokens, masks = (np.concatenate(rows) for rows in zip(*records, strict=True))
    offsets = 5 + np.cumsum([0, *(len(tokens) for tokens, _ in records)])
    dataset = Dataset(tokens, offsets, masks, "the data")
    return RecordSamples(dataset, dataset.spans(np.arange(len(records))), 8, packed, END)


class TestRecordSamples:
    def test_records_of_a_sample_are_documents(self) -> None:
        dataset = samples_of([record(4, 10, 2), record(3, 20)])
        assert len(dataset) == 1
        tokens, labels, documents = dataset[0]
        assert tokens.tolist() == [10, 11, 12, 20, 21, END, END, END]
        assert labels.tolist() == [IGNORED, 12, 13, IGNORED, 22, IGNORED, IGNORED, IGNORED]
        assert documents is not None
        assert documents.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
        assert dataset.learnt == 3
        assert dataset.dataset.some_labels().tolist() == [12, 13, 22]

    def test_one_record_in_each(self) -> None:
        dataset = samples_of([record(4, 10), record(3, 20)], packed=False)
        assert [dataset[index].tokens[0] for index in range(len(dataset))] == [10, 20]
        assert dataset[0].documents is None

    def test_longer_records_are_cut_and_without_an_answer_left_out(self) -> None:
        long = [record(12, 0, 6), record(12, 50, 2)]
        dataset = samples_of([*long, record(9, 90)], packed=False)  # a sample holds 8 tokens and their labels
        assert (dataset.cut, dataset.left_out) == (1, 1)
        assert len(dataset) == 2
        assert dataset[0].labels.tolist() == [IGNORED] * 5 + [6, 7, 8]
        with pytest.raises(ValueError, match="the data: none of 1 records has an answer within 8 tokens"):
            samples_of([record(12, 0, 2)])

    @settings(max_examples=100)
    @given(lengths=st.lists(st.integers(1, 20), max_size=60))
    def test_packing_is_tight_and_complete(self, lengths: list[int]) -> None:
        samples = pack(lengths, 20)
        assert sorted(place for sample in samples for place in sample) == list(range(len(lengths)))
        fills = sorted(sum(lengths[place] for place in sample) for sample in samples)
        assert all(fill <= 20 for fill in fills)
        assert len(fills) < 2 or fills[0] + fills[1] > 20


def source(path: str, split: str = "8,2", packed: bool = True) -> RecordSource:
    return RecordSource(path, Split.parse(split), packed=packed)


def test_splits_are_whole_records_in_their_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": "", "completion": str(n)} for n in range(10)))
    needs = Needs(257, 8, global_batch=2)
    built = open_data(source(path, packed=False), BYTES, needs)
    first = [BYTES.decode(built.training[index].tokens[1:2]) for index in range(len(built.training))]
    assert first == list("01234567")
    assert "10 records, 8 training samples with 16 tokens in answers, 100 % of all" in built.summary
    (validation,) = open_validation(source(path, packed=False), BYTES, needs, {}, 8).parts
    assert len(validation) == 2
    with pytest.raises(ValueError, match=r"the validation split of .* is empty; raise"):
        open_data(source(path, "999,1"), BYTES, needs)


def test_records_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    """In records, also where an answer is a sequence of its own."""
    texts = [("", "a"), ("", "a" * 12), ("a" * 12, "b"), ("", "c")]
    for name in ("a", "b"):
        given = [{"prompt": prompt, "completion": answer} for prompt, answer in texts]
        write(tmp_path / f"{name}.jsonl", *given[: 1 if name == "a" else None])
    summary = open_data(source(str(tmp_path), "1"), BYTES, Needs(257, 8, evaluates=False)).summary
    assert summary.endswith(
        "5 records, 2 training samples with 14 tokens in answers, 100 % of all tokens; records longer than a "
        "sample, cut: 1; records left out, since no answer fits: 1"
    )


def test_other_roles_are_named_with_the_share_that_is_learnt(model: Path, tmp_path: Path) -> None:
    """A template writes a misspelt role as it is, and nothing of its message is learnt."""
    chat = [CHAT[1], CHAT[2] | {"role": "assitant"}, *CHAT[3:]]
    path = write(tmp_path / "a.jsonl", {"messages": chat}, {"messages": CHAT})
    summary = open_data(source(path, "1"), tokenizer_at(model), Needs(300, 256, evaluates=False)).summary
    assert re.search(
        r"with \d+ tokens in answers, \d\d\.\d % of all tokens; messages of other roles than", summary
    )
    assert summary.endswith('system, user, assistant, tool: "assitant" (1), nothing is learnt of them')


def test_empty_answers_are_counted(model: Path, tmp_path: Path) -> None:
    empty = {"role": "assistant", "content": " "}
    given = (
        {"messages": [*CHAT, CHAT[1], empty]},
        {"messages": [*CHAT, CHAT[1], empty | {"weight": 0}]},
        {"prompt": "a", "completion": ""},
        {"prompt": "", "completion": "a"},
    )
    path = write(tmp_path / "a.jsonl", *given)
    built = open_data(source(path, "1"), tokenizer_at(model), Needs(300, 64, evaluates=False))
    assert built.summary.endswith("; empty answers: 2, of which only the end is learnt")


def test_answers_that_nothing_ends_are_counted(tmp_path: Path) -> None:
    """As with the template of GLM-4.5, or with {{ eos_token }} where no file names the token."""
    path = write(tmp_path / "a.jsonl", {"messages": CHAT}, {"prompt": "a", "completion": "b"})
    for end, note in (
        ("<end>", ""),
        ("{{ no_token }}", "; answers after which the chat template writes no special token: 2, "),
    ):
        tokenizer = tokenizer_at(chat_tokenizer(tmp_path / "tokenizer", TEMPLATE.replace("<end>", end)))
        summary = open_data(source(path, "1"), tokenizer, Needs(300, 64, evaluates=False)).summary
        assert ("no special token" in summary) == bool(note)
        assert note in summary


@pytest.mark.parametrize("changed", ["prompt", "completion"])
def test_the_checksum_is_of_prompts_and_answers(changed: str, tmp_path: Path) -> None:
    records = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(9)]
    others = [{**record, changed: record[changed].replace("e", "f")} for record in records]
    needs = Needs(257, 32, evaluates=False)
    one, same, other = (
        open_data(source(write(tmp_path / f"{name}.jsonl", *given)), BYTES, needs).checksums
        for name, given in (("one", records), ("same", records), ("other", others))
    )
    assert one == same != other


def test_the_checksum_is_of_which_tokens_have_a_loss(tmp_path: Path) -> None:
    first, second = (samples_of([record(9, answered=answered)]).contents for answered in (2, 3))
    assert [np.array_equal(a[:], b[:]) for a, b in zip(first, second, strict=True)] == [True, False, True]
