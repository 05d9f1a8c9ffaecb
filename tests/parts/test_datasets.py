"""What a run reads: text or indexed datasets, blended; the same for all ranks, and refused in one line."""

import copy
import json
import math
import shutil
import threading
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_noloco.config import RunConfig
from megatron_noloco.data.auto_tokenizer import build_tokenizer
from megatron_noloco.data.blend import Blend
from megatron_noloco.data.microbatches import Loader, ValidationSource, addresses_of, training_microbatch
from megatron_noloco.data.opening import Data, open_data, open_validation, open_whole
from megatron_noloco.data.record_samples import RecordSamples
from megatron_noloco.data.samples import Samples
from megatron_noloco.data.sources import IndexedSource, Needs, Split, TextSource, parse_prefixes
from megatron_noloco.data.tokenizer import ByteTokenizer, TokenizerChoice
from megatron_noloco.monitor.metrics import unrecorded
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.sample_order import BatchPlan, Order, slots_of
from megatron_noloco.plans.topology import Position, Topology
from megatron_noloco.training.prepare import check_start, prepare, read_data
from megatron_noloco.training.start import checkpoint_settings
from tests.kit.configs import SMALLEST
from tests.kit.datasets import sequences_of, write_dataset
from tests.kit.ranks import call_here, output_of, refusal_of

SEQ = 8


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets `a` (40 documents of 10 tokens, all even), `b` (20 of 20, all odd), and one of one sequence."""
    folder = tmp_path_factory.mktemp("datasets")
    for name, count, length in (("a", 40, 10), ("b", 20, 20), ("one", 1, 90)):
        write_dataset(folder / name, [[index * 2 + (name == "b")] * length for index in range(count)])
    return folder


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def build(
    seq_length: int = SEQ,
    global_batch: int = 1,
    vocab: int = 257,
    evaluates: bool = True,
    seed: int = 0,
    **data: Any,
) -> Data:
    """`data`: as in a config's block of that name."""
    config = RunConfig(**run_config(data, iters=0))
    needs = Needs(vocab, seq_length, global_batch, seed, evaluates)
    return open_data(config.data.source, build_tokenizer(config.data.tokenizer), needs)


class TestIndexed:
    def test_splits_are_whole_sequences(self) -> None:
        built = build(data_path="a", split="8,1,1")
        train, validation = built.training.parts[0], built.validation.parts[0]
        assert train.tokens.tolist() == [token for index in range(32) for token in [2 * index] * 10]
        assert validation.tokens.tolist() == [token for index in range(32, 36) for token in [2 * index] * 10]
        assert isinstance(train.tokens.base, np.ndarray), "a view of the file, not a copy"
        assert "320 tokens of the training split of a (100 %)" in built.summary

    def test_data_checksum_depends_on_contents_alone(self, folder: Path, tmp_path: Path) -> None:
        for suffix in (".bin", ".idx"):
            shutil.copyfile(folder / f"a{suffix}", tmp_path / f"moved{suffix}")
        moved = str(tmp_path / "moved")
        assert build(data_path="a").checksums == build(data_path=moved).checksums
        blends: list[list[Any]] = [[0.3, "a", 0.7, "b"], [0.4, "a", 0.6, "b"], [0.3, "b", 0.7, "a"]]
        built = [build(data_path=paths).checksums for paths in ("a", "b", *blends)]
        for name in built[0]:
            assert len({checksums[name] for checksums in built}) == 5
        assert build(data_path=[0.3, moved, 0.7, "b"]).checksums == built[2]

    def test_the_checksum_depends_on_where_documents_begin(self, tmp_path: Path) -> None:
        for name, cut in (("one", 10), ("other", 11)):
            write_dataset(tmp_path / name, np.split(np.arange(40), [cut]))
        options: dict[str, Any] = {"split": "1,0,0", "evaluates": False}
        one, other = (build(data_path=str(tmp_path / name), **options).checksums for name in ("one", "other"))
        assert one != other

    def test_each_split_may_have_paths_of_its_own(self) -> None:
        built = build(train_data_path=["a"], valid_data_path="b")
        assert len(built.training.parts[0].tokens) == len(built.validation.parts[0].tokens) == 400
        assert build(train_data_path="a", evaluates=False).validation is None

    @settings(max_examples=50)
    @given(
        weights=st.tuples(st.integers(1, 999), st.integers(0, 999), st.integers(0, 999)),
        sequences=st.integers(1, 10_000),
    )
    def test_splits_are_megatrons(self, weights: tuple[float, float, float], sequences: int) -> None:
        from megatron.core.datasets import blended_megatron_dataset_config as core

        ours = Split.parse(",".join(map(str, weights))).bounds(sequences)
        shares = [weight / sum(weights) for weight in weights]
        for index, bounds in enumerate(core.convert_split_vector_to_split_matrix(shares)):
            if bounds is not None:
                theirs = [round(bound * sequences) for bound in bounds]
                assert theirs == ours[index : index + 2]

    def test_a_blend_has_samples_of_each_dataset_by_its_weight(self) -> None:
        built = build(data_path=["0.25", "a", "0.75", "b"], split="8,1,1")
        assert isinstance(built.training, Blend)
        sizes = [len(part) for part in built.training.parts]
        assert len(built.training) == sum(sizes)
        order = built.training.order(seed=5)
        samples = [built.training[index] for index in order.ids(0, 400)]
        assert sum(int(sample.tokens[0]) % 2 for sample in samples) == 300
        assert built.validation.weights == (0.25, 0.75)
        assert all(sample.tokens.shape == sample.labels.shape == (SEQ,) for sample in samples)
        with pytest.raises((AssertionError, IndexError)):
            built.training[sum(sizes)]

    def test_a_share_is_shown_as_it_is_read(self) -> None:
        summary = build(data_path=[1e-9, "a", 1, "b"], split="8,1,1").summary
        assert "of the training split of a (0.009999 %), " in summary

    @pytest.mark.parametrize("split", ["8,2,0", "1,1,0"])
    def test_a_negative_token_is_one_line(self, split: str, tmp_path: Path) -> None:
        documents = [[5, 5, 5, -1 if number == 30 else 3, 5, 5, 5, 5, 5, 5] for number in range(40)]
        prefix = write_dataset(tmp_path / "negative", documents, vocab_size=1 << 20)
        line = "negative holds token -1, the vocabulary has 257 .from 0 on.: it is damaged, or"
        with pytest.raises(ValueError, match=line):
            build(data_path=prefix, split=split)
        with pytest.raises(ValueError, match=line):
            open_whole(prefix, build_tokenizer(TokenizerChoice()), Needs(257, SEQ))
        shown = output_of("data", "inspect", prefix, "--samples", "40")
        assert "document 30: tokens 5 5 5 -1 5" in shown

    def test_dataset_of_another_tokenizer_is_refused(self, tmp_path: Path) -> None:
        """Its tokens would be in the vocabulary. One that Megatron has made says nothing of its tokenizer."""
        prefix, byte = str(tmp_path / "made"), build_tokenizer(TokenizerChoice())
        other: Any = SimpleNamespace(digest="of another tokenizer")
        config = RunConfig(**run_config({"data_path": prefix, "split": "1,1,0"}))
        doors: list[Callable[[], object]] = [
            lambda: build(data_path=prefix, split="1,1,0"),
            lambda: open_validation(config.data.source, byte, Needs(257, SEQ), {}, SEQ),
            lambda: open_whole(prefix, byte, Needs(257, SEQ)),
            lambda: check_start(config),
        ]
        line = r"made: the dataset was made with another tokenizer than that of"
        for made_with in (other, byte, None):
            Path(f"{prefix}.idx").unlink(missing_ok=True)
            Path(f"{prefix}.facts.json").unlink(missing_ok=True)
            write_dataset(Path(prefix), [np.arange(10)] * 8, tokenizer=made_with)
            for door in doors:
                with pytest.raises(ValueError, match=line) if made_with is other else nullcontext():
                    door()


def test_evaluation_takes_a_text_for_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}')
    samples, _ = open_whole(str(tmp_path / "a.jsonl"), ByteTokenizer(), Needs(257, SEQ))
    assert bytes(labels_of(samples)) == b"ome text"


@pytest.mark.parametrize("ends", [False, True])
def test_evaluation_reads_each_document_apart(ends: bool, tmp_path: Path) -> None:
    """A token is a label once: after BOS or the end before, in pieces of a long one; neither end nor BOS is."""
    end = 256
    documents = [[*b"0123456789"], [], [*b"a"], [*b"bc"]]
    prefix = write_dataset(tmp_path / "data", [[*one, *[end] * ends] for one in documents])
    samples, _ = open_whole(prefix, ByteTokenizer(), Needs(257, 4))
    assert sorted(labels_of(samples)) == [*(b"123456789abc" if ends else b"123456789c")]
    read = [samples[number] for number in range(len(samples))]
    assert {tuple(one.tokens[one.documents == 0][:4].tolist()) for one in read} >= {
        tuple(b"0123"),
        tuple(b"4567"),
    }
    assert (
        samples.tokens_per_sample == samples.learnt / len(samples) == len(labels_of(samples)) / len(samples)
    )


def test_evaluation_takes_records_for_what_they_are(tmp_path: Path) -> None:
    """Their answers alone; a dataset of no text is refused."""
    (path := tmp_path / "a.jsonl").write_text('{"prompt": "a ", "completion": "text"}\n')
    samples, _ = open_whole(str(path), ByteTokenizer(), Needs(257, SEQ))
    answer = [*b"text", ByteTokenizer.end_of_document]
    assert labels_of(samples) == samples.dataset.some_labels().tolist() == answer
    empty = write_dataset(tmp_path / "data", [[256], [256]])
    with pytest.raises(ValueError, match=r"data: holds no text of two tokens"):
        open_whole(empty, ByteTokenizer(), Needs(257, SEQ))


def labels_of(samples: RecordSamples) -> list[int]:
    """The tokens with a loss, sample by sample."""
    read = (samples[number].labels for number in range(len(samples)))
    return [label for labels in read for label in labels.tolist() if label >= 0]


def run_config(data: dict[str, Any], **evaluation: Any) -> dict[str, Any]:
    blocks = {"data": data, "evaluation": evaluation, "noloco": {"enabled": False}}
    return copy.deepcopy(SMALLEST | blocks | {"model": SMALLEST["model"] | {"seq_length": SEQ}})


def check_of(folder: Path, config: dict[str, Any]) -> tuple[str, str, Path]:
    """Return a command that checks the config, written as run.json."""
    (folder / "run.json").write_text(json.dumps(config))
    return "config", "--check", folder / "run.json"


@pytest.mark.parametrize(
    ("evaluation", "microbatches"),
    [({"iters": 1}, [1, 1]), ({"full": True}, [2, 2]), ({"iters": 0}, []), ({}, [2, 2])],
)
def test_a_run_measures_on_each_dataset(evaluation: dict[str, Any], microbatches: list[int]) -> None:
    config = RunConfig(**run_config({"data_path": [1, "a", 3, "b"], "split": "8,1,1"}, **evaluation))
    known = prepare(config, {})
    _, validation = read_data(config, known.topology, known.tokenizer, known.architecture)
    assert list(map(len, validation)) == microbatches
    assert [source.weight for source in validation] == [0.25, 0.75][: len(validation)]


@pytest.mark.parametrize("iters", [2, 3])
def test_a_check_counts_the_samples_of_an_evaluation(iters: int, tmp_path: Path) -> None:
    """Of indexed datasets, whose sizes are known before anything is tokenized."""
    config = run_config({"data_path": [1, "a", 3, "b"], "split": "8,1,1"}, iters=iters)
    config["training"]["output_dir"] = str(tmp_path / "run")
    code, _, err = call_here(*check_of(tmp_path, config), "--world-size", "1")
    assert (code == 0) == (iters == 2)
    assert ("lower evaluation.iters" in err) == (iters == 3)


@pytest.mark.parametrize(("field", "what"), [("text", "documents"), ("sft_data_path", "records")])
def test_a_check_finds_an_empty_file(field: str, what: str, tmp_path: Path) -> None:
    (file := tmp_path / "a.jsonl").touch()
    line = refusal_of(*check_of(tmp_path, run_config({field: str(file)})))
    assert f"data.{field}: no {what} in {file}" in line
    (folder := tmp_path / "in").mkdir()
    (folder / "a.png").write_bytes(b"\xff")
    line = refusal_of(*check_of(tmp_path, run_config({field: str(folder)})))
    assert f"data.{field}: no {what} in {folder}; left out: 1 file " in line


@pytest.mark.parametrize(
    ("field", "row", "line"),
    [
        ("text", {"body": "a"}, "a.jsonl, line 1: no key 'text'; there are body"),
        (
            "sft_data_path",
            {"instruction": "a"},
            'a.jsonl, line 1: {"instruction": "a"} (keys: instruction) is no record',
        ),
        ("sft_data_path", {"messages": [{"role": "user"}]}, "a.jsonl, line 1: no message has the role"),
    ],
)
def test_a_check_reads_the_first_rows(field: str, row: dict[str, Any], line: str, tmp_path: Path) -> None:
    (file := tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert line in refusal_of(*check_of(tmp_path, run_config({field: str(file)})))


@pytest.mark.parametrize("field", ["text", "sft_data_path"])
@pytest.mark.parametrize("output", ["texts/runs/mine", "elsewhere/runs"])
def test_a_run_does_not_read_what_it_writes(
    field: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("texts", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text('{"prompt": "a", "completion": "b", "text": "c"}\n')
    (tmp_path / "texts" / "a.txt").write_text("text")
    (tmp_path / "texts" / "link").symlink_to(tmp_path / "elsewhere")
    config = run_config({field: "texts"})
    config["training"]["output_dir"] = output
    line = refusal_of(*check_of(tmp_path, config))
    assert f"training.output_dir {output} lies in data.{field} texts: what" in line
    config["training"]["output_dir"] = "runs"
    output_of(*check_of(tmp_path, config))
    file = "texts/a.txt" if field == "text" else "texts/a.jsonl"
    output_of(*check_of(tmp_path, config | {"data": config["data"] | {field: file}}))


def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    *_, path = check_of(tmp_path, run_config({"text": str(loop)}))
    refusal_of("train", "--config", path)


class TestText:
    def test_no_validation_where_nothing_is_evaluated(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("0123456789")
        assert build(text=str(tmp_path / "a.txt"), split="1,0,0", evaluates=False).validation is None
        line = r"corpus too small: the validation split of .* is empty; raise its weight in data.split"
        with pytest.raises(ValueError, match=line):
            build(text=str(tmp_path / "a.txt"), split="1,0,0")

    def test_epochs_and_text_that_is_read_twice_are_told(self, folder: Path, tmp_path: Path) -> None:
        needs, byte = Needs(257, SEQ, global_batch=10, steps=98), ByteTokenizer()
        both = IndexedSource((("a", 0.5), ("b", 0.5)), None, Split.parse("1,1"))
        line = "epochs in 98 steps: 20.4 of the training split of a, 20.4 of the training split of b"
        assert open_data(both, byte, needs).summary.endswith(line)
        for suffix in (".bin", ".idx"):
            shutil.copyfile(folder / f"a{suffix}", tmp_path / f"copy{suffix}")
        copy = str(tmp_path / "copy")
        told = (
            "; sequences of validation that are also training data: 40 of 40 compared; the loss on them says"
        )
        for name in ("a", "b"):
            source = IndexedSource(((name, 1.0),), ((copy, 1.0),), None)
            assert (told in open_data(source, byte, needs).summary) == (name == "a")

    def test_of_large_datasets_the_same_sequences_are_compared(self, tmp_path: Path) -> None:
        large = write_dataset(tmp_path / "large", ([*divmod(number, 200), 256] for number in range(20_011)))
        data = open_data(
            IndexedSource(((large, 1.0),), ((large, 1.0),), None), ByteTokenizer(), Needs(257, SEQ)
        )
        assert "also training data: 1024 of 1024 compared;" in data.summary

    def test_documents_of_validation_that_training_reads_are_counted(self, tmp_path: Path) -> None:
        """Wherever they lie in the files."""
        texts = [f"document {number}" for number in range(10)]
        for name, lines in {"a": texts, "b": [*texts[7:], "another"]}.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
        line = "also training data: 3 of 4 compared;"
        assert line in build(text=str(tmp_path), split="10,4").summary

    def test_records_that_begin_alike_are_not_the_same(self, tmp_path: Path) -> None:
        """As chats with the same tools do, whose lengths may be equal, too."""
        records = [{"prompt": "the same tools" * 40, "completion": str(answer)} for answer in range(10)]
        (path := tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
        data = build(seq_length=600, sft_data_path=str(path), split="7,3")
        assert "also training data" not in data.summary

    def test_documents_without_an_end_are_told(self, tmp_path: Path) -> None:
        line = "; documents of {} have no end-of-document token (preprocess with --append-eod)"
        for ends in (True, False):
            prefix = write_dataset(tmp_path / str(ends), [[*range(20), *[256] * ends]] * 8)
            summary = build(data_path=prefix, split="1,0,0", evaluates=False).summary
            assert (line.format(prefix) in summary) != ends

    def test_datasets_without_weights_are_read_by_their_sizes(self) -> None:
        built = build(data_path=["a", "one"], split="1,0,0", evaluates=False)
        assert built.training.weights == (400 / 490, 90 / 490)

    def test_a_run_of_another_split_is_refused(self, tmp_path: Path) -> None:
        """Version 0.4 put each of many files in one split; what it validated on is not known today."""
        run = RunConfig(**SMALLEST | {"data": {"text": str(tmp_path), "split": "8,2"}})
        now = checkpoint_settings(run, Topology(), {"training_data_2": 1})
        with pytest.raises(ValueError, match=r"^data.text: the checkpoint's run divided its files otherwise"):
            now.changes(run.to_dict(), {"training_data_3": 2})

    def test_validation_split_is_that_of_the_data_of_the_run(self, tmp_path: Path) -> None:
        """Of other data it may hold what the run was trained on. Samples may be longer than the training split."""
        path, byte = tmp_path / "a.txt", ByteTokenizer()
        path.write_text("some text " * 90)
        source, needs = TextSource(str(path), Split.parse("1,9")), Needs(257, SEQ)
        counters = open_data(source, byte, needs).checksums
        for length in (SEQ, 200):
            found = open_validation(source, byte, replace(needs, seq_length=length), counters, SEQ)
            assert found.seq_length == length
        path.write_text("some text " * 90 + "and more")
        open_validation(source, byte, needs, {"training_data": 1}, SEQ)  # of a run of 0.2
        with pytest.raises(ValueError, match=r"^the data have other contents than .* give --data\)$"):
            open_validation(source, byte, needs, counters, SEQ)

    def test_validation_data_of_its_own_must_be_those_of_the_run(self) -> None:
        """Whatever training reads by now."""
        byte, needs = ByteTokenizer(), Needs(257, SEQ)
        a_and_b, b_and_b, a_and_a = (
            IndexedSource(((one, 1.0),), ((other, 1.0),), None) for one, other in ("ab", "bb", "aa")
        )
        counters = open_data(a_and_b, byte, needs).checksums
        assert open_validation(b_and_b, byte, needs, counters, SEQ).name == "b"
        with pytest.raises(ValueError, match=r"^the data have other contents"):
            open_validation(a_and_a, byte, needs, counters, SEQ)


class TestUnigramEntropy:
    def entropy(self, tmp_path: Path, train: list[int], validation: list[int]) -> float:
        first, second = (
            write_dataset(tmp_path / name, [tokens]) for name, tokens in (("t", train), ("v", validation))
        )
        return build(seq_length=1, train_data_path=first, valid_data_path=second).unigram_entropy

    def test_known_cross_entropy(self, tmp_path: Path) -> None:
        expected = -(math.log(4 / 261) + math.log(2 / 261) + 2 * math.log(1 / 261)) / 4
        assert self.entropy(tmp_path, [65] * 3 + [66], [65, 66, 67, 67]) == pytest.approx(expected)

    def test_a_blend_is_its_parts_in_proportion(self) -> None:
        once = build(data_path="a").unigram_entropy
        assert build(data_path=["0.5", "a", "0.5", "a"]).unigram_entropy == pytest.approx(once)

    def test_nothing_to_measure_on(self) -> None:
        assert math.isnan(build(data_path="a", evaluates=False).unigram_entropy)


blends = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4)


class TestOrderOfABlend:
    def order(self, blend: list[tuple[int, int]], seed: int = 3) -> Order:
        total = sum(weight for _, weight in blend)
        return Order(tuple(size for size, _ in blend), tuple(weight / total for _, weight in blend), seed)

    @settings(max_examples=20)
    @given(blend=blends, count=st.integers(1, 300))
    def test_every_part_is_read_epoch_by_epoch(self, blend: list[tuple[int, int]], count: int) -> None:
        """Of each part: a sample comes again only when all its others have come."""
        ids = self.order(blend).ids(0, count)
        base = 0
        for size, _ in blend:
            own = ids[(ids >= base) & (ids < base + size)] - base
            for start in range(0, len(own), size):
                epoch = own[start : start + size]
                assert len(set(epoch.tolist())) == len(epoch)
            base += size
        assert ids.min() >= 0
        assert ids.max() < base

    @settings(max_examples=20)
    @given(blend=blends, count=st.integers(1, 300))
    def test_proportions_hold_at_any_place(self, blend: list[tuple[int, int]], count: int) -> None:
        order = self.order(blend)
        ids = order.ids(0, count)
        bounds = np.cumsum([0, *(size for size, _ in blend)])
        taken = np.histogram(ids, bounds)[0] if len(blend) > 1 else np.array([count])
        shares = np.array([weight for _, weight in blend]) / sum(weight for _, weight in blend)
        assert np.all(np.abs(taken - shares * count) <= len(blend) + 0.001 * count)

    @settings(max_examples=20)
    @given(blend=blends, cuts=st.lists(st.integers(0, 1_000), min_size=2, max_size=6, unique=True))
    def test_pieces_make_up_the_whole(self, blend: list[tuple[int, int]], cuts: list[int]) -> None:
        """A resume at any place reads what an unbroken run reads."""
        order, cuts = self.order(blend), sorted(cuts)
        pieces = [order.ids(a, b - a) for a, b in pairwise(cuts)]
        assert np.array_equal(np.concatenate(pieces), order.ids(cuts[0], cuts[-1] - cuts[0]))

    def test_the_order_of_a_blend_stays_as_it_is(self) -> None:
        """Resumes depend on it: recorded with version 0.2."""
        weights = (0.123456, 0.3, 0.5 - 0.123456, 0.0769, 0.1231)
        ids = Order((70, 50, 300, 20, 90), weights, seed=4).ids(12_345, 20_000)
        assert zlib.crc32(ids.astype("<i8").tobytes()) == 3608469349

    def test_many_small_weights_are_exact_to_1_in_10000_or_refused(self) -> None:
        small = 300
        ids = Order((1000,) * (small + 1), (0.997, *[1e-5] * small), 1).ids(0, 100_000)
        assert abs((ids < 1000).mean() - 0.997) <= 1e-4
        line = r"^has weights too small for 1/10000: the share 1.00000 would be 0.99970, since each part"
        with pytest.raises(ValueError, match=line):
            parse_prefixes([item for n in range(small + 1) for item in (1e-9 if n else 1.0, f"prefix{n}")])

    @given(weights=st.lists(st.floats(1e-6, 1), min_size=1, max_size=80))
    def test_shares_are_exact_to_1_in_10000(self, weights: list[float]) -> None:
        slots = slots_of([weight / sum(weights) for weight in weights])
        for slot, weight in zip(slots, weights, strict=True):
            assert abs(slot / sum(slots) - weight / sum(weights)) <= 1e-4

    def test_small_weights_and_equal_parts(self) -> None:
        order = Order((7, 7), (0.99999, 0.00001), seed=1)
        assert order.slots == (10_000, 1)
        halves = Order((50, 50), (0.5, 0.5), seed=1).ids(0, 100)
        assert halves[halves < 50].tolist() != (halves[halves >= 50] - 50).tolist()


plans = st.builds(
    BatchPlan,
    replicas=st.integers(1, 4),
    dp=st.integers(1, 2),
    microbatches=st.integers(1, 3),
    micro_batch_size=st.integers(1, 3),
)


@settings(max_examples=60)
@given(
    runs=st.lists(st.tuples(plans, st.integers(1, 4)), min_size=1, max_size=4),
    samples=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_each_sample_once_per_epoch_over_resizes(
    runs: list[tuple[BatchPlan, int]], samples: int, seed: int
) -> None:
    """A run that is stopped and goes on with other replicas, dp and batches, as often as you like."""
    order = Order.of(samples, seed)
    read: list[int] = []
    step, consumed = 0, 0
    for shape, steps in runs:
        plan = BatchPlan(shape.replicas, shape.dp, shape.microbatches, shape.micro_batch_size, step, consumed)
        for at in range(step, step + steps):
            for replica in range(plan.replicas):
                for dp in range(plan.dp):
                    for microbatch in range(plan.microbatches):
                        first = plan.first(at, replica, dp, microbatch)
                        read += order.ids(first, plan.micro_batch_size).tolist()
        step, consumed = step + steps, plan.consumed(step + steps)
    assert len(read) == consumed
    for start in range(0, len(read), samples):
        epoch = read[start : start + samples]
        assert len(set(epoch)) == len(epoch)


class TestLoader:
    """Three replicas of two stages, two data-parallel ranks; routes of every step."""

    topology = Topology(replicas=3, pp=2, dp=2)
    plan = BatchPlan(3, 2, 2, 2)
    routing = Routing(3, 2, seed=1, interval="microbatch")

    def source(self) -> Callable[..., Any]:
        dataset = Samples(sequences_of(np.arange(30 * 4 + 1)), Needs(121, 4))
        return partial(training_microbatch, dataset, Order.of(len(dataset), seed=1), self.plan, 1)

    def loader(self, source: Callable[..., Any], stage: int, record: Any = unrecorded) -> Loader:
        position = Position(replica=2, stage=stage, dp=1, tp=0)
        addresses = partial(addresses_of, self.topology, position, False, self.plan.microbatches)
        return Loader(source, addresses, self.routing, 2, record)

    def test_it_reads_what_the_source_reads(self) -> None:
        source = self.source()
        first, last = self.loader(source, 0), self.loader(source, 1)
        for step in range(4):
            (read_tokens, routes), (read_labels, same_routes) = first.step(step), last.step(step)
            assert routes == same_routes == self.routing.routes(step, step // 2)
            for microbatch in range(2):
                origin = routes.origin(1, 2, microbatch)
                for read, replica in ((read_tokens, 2), (read_labels, origin)):
                    ours, direct = read(replica, microbatch), source(step, replica, microbatch)
                    assert torch.equal(ours.tokens, direct.tokens)
                    assert torch.equal(ours.labels, direct.labels)
        first.close()
        last.close()

    @pytest.mark.parametrize("separate_documents", [False, True])
    @pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (3, 1), (2, 2)])
    def test_a_rank_reads_what_is_routed_to_its_chunks(
        self, pp: int, vpp: int, separate_documents: bool
    ) -> None:
        """To the two ends of the pipeline, and with separate documents to all chunks."""
        routes, topology = self.routing.routes(5, 2), Topology(replicas=3, pp=pp, vpp=vpp)
        for stage in range(pp):
            chunks = set(range(stage, pp * vpp, pp))
            if not separate_documents:
                chunks &= {0, pp * vpp - 1}
            expected = {(routes.origin(chunk, 1, m) if chunk else 1, m) for chunk in chunks for m in range(2)}
            position = Position(replica=1, stage=stage, dp=0, tp=0)
            assert addresses_of(topology, position, separate_documents, 2, routes) == expected

    def test_loader_reads_ahead_and_counts_wait(self) -> None:
        read, go = self.source(), threading.Event()
        steps: list[int] = []
        threads = set()

        def slow(*address: int) -> Any:
            steps.append(address[0])
            threads.add(threading.current_thread())
            go.wait(5)
            return read(*address)

        waited: list[float] = []
        loader = self.loader(slow, 0, lambda name, seconds, *_: waited.append(seconds))
        given = loader.step(2)  # returns at once
        assert not waited
        threading.Timer(0.05, go.set).start()
        given.read(2, 0)
        assert len(waited) == 1
        assert waited[0] > 0
        loader.step(3).read(2, 1)
        loader.close()
        assert steps[:4] == [2, 2, 3, 3]
        assert set(steps[4:]) <= {4}
        assert threading.main_thread() not in threads

    def test_what_cannot_be_read_is_raised_where_it_is_needed(self) -> None:
        loader = self.loader(lambda *_: 1 / 0, 0)
        given = loader.step(0)
        with pytest.raises(ZeroDivisionError):
            given.read(2, 0)
        loader.close()


@pytest.mark.parametrize(
    ("count", "multiple", "taken", "samples"),
    [(None, 1, 11, 31), (None, 4, 12, 31), (5, 4, 8, 24), (11, 4, 12, 31), (1, 4, 4, 12)],
)
def test_validation_fills_the_pipeline(count: int | None, multiple: int, taken: int, samples: int) -> None:
    """31 samples are 10 microbatches of 3 and a rest; a pipeline with virtual stages takes 4 at once, or 8."""
    dataset = Samples(sequences_of(np.arange(31 * 4 + 1)), Needs(125, 4))
    source = ValidationSource(dataset, 3, count, multiple_of=multiple)
    found = [source.microbatch(index) for index in range(len(source))]
    labels = torch.cat([microbatch.labels for microbatch in found])
    learnt = labels[labels >= 0].tolist()
    assert len(source) == taken
    assert len(learnt) == len({*learnt}) == 4 * samples
