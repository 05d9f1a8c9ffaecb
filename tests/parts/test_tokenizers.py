"""What decides the tokens of a text is known of a tokenizer, and the same wherever the tokenizer is read."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_noloco.checkpoint.run_settings import TEMPLATE, TOKENS, CheckpointSettings, tokenizer_folder
from megatron_noloco.config import RunConfig
from megatron_noloco.data.auto_tokenizer import (
    build_tokenizer,
    check_exported,
    find_tokenizer,
)
from megatron_noloco.data.indexed import Dataset, read_indexed
from megatron_noloco.data.opening import Data, open_data
from megatron_noloco.data.sources import (
    IndexedSource,
    Needs,
    RecordSource,
    Source,
    Split,
    TextSource,
    parse_prefixes,
)
from megatron_noloco.data.tokenizer import ByteTokenizer, TokenizerChoice, write_copy
from megatron_noloco.plans.topology import Topology
from megatron_noloco.training.prepare import _tokenizer
from megatron_noloco.training.start import checkpoint_settings
from tests.kit.chats import write
from tests.kit.configs import SMALLEST
from tests.kit.datasets import load_records
from tests.kit.ranks import output_of
from tests.kit.tokenizers import TEXT, tokenizer_at, write_tokenizer


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


class TestDigest:
    def test_it_is_that_of_the_content_not_of_the_file(self, tmp_path: Path) -> None:
        """Order, indents, fields that newer files have, what texts are cut or padded to decide no token."""
        first = tokenizer_at(write_tokenizer(tmp_path / "first"))
        file = write_tokenizer(tmp_path / "second") / "tokenizer.json"
        content = json.loads(file.read_text())
        del content["model"]["ignore_merges"]
        content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
        cut = {"max_length": 4, "strategy": "LongestFirst", "stride": 0}
        filled = {"strategy": {"Fixed": 99}, "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
        content["truncation"], content["padding"] = (one | {"direction": "Right"} for one in (cut, filled))
        file.write_text(json.dumps(dict(reversed(content.items()))))
        second = tokenizer_at(file.parent)
        assert second.encode(TEXT[0]).tolist() == first.encode(TEXT[0]).tolist()
        assert second.digest == first.digest

    def test_whatever_changes_tokens_changes_it(self, tmp_path: Path) -> None:
        folders = [
            write_tokenizer(tmp_path / str(place), pieces)
            for place, pieces in enumerate((20, 21, 20, 20, 20))
        ]
        change(folders[2] / "tokenizer_config.json", eos_token="<|im_end|>")
        change(folders[3] / "tokenizer_config.json", bos_token=None)
        change(folders[4] / "tokenizer.json", normalizer={"type": "NFC"})
        digests = [tokenizer_at(folder).digest for folder in folders] + [ByteTokenizer().digest]
        assert len({*digests}) == len(digests)

    def test_other_merges_or_rules_are_another_tokenizer(self, tmp_path: Path) -> None:
        ours, merged, normalized = (write_tokenizer(tmp_path / name) for name in "abc")
        model = json.loads((merged / "tokenizer.json").read_text())["model"]
        change(merged / "tokenizer.json", model=model | {"merges": model["merges"][::-1]})
        change(normalized / "tokenizer.json", normalizer={"type": "NFC"})
        same, *others = (tokenizer_at(folder) for folder in (ours, merged, normalized))
        assert same.extends(tokenizer_at(ours))
        assert all(other.vocabulary == same.vocabulary for other in others)
        assert not any(other.extends(same) for other in others)

    @pytest.mark.parametrize("in_own_file", [False, True])
    def test_a_template_has_one_of_its_own(self, tmp_path: Path, in_own_file: bool) -> None:
        plain, chat = write_tokenizer(tmp_path / "plain"), write_tokenizer(tmp_path / "chat")
        template = "{{ bos_token }}{{ messages[0].content }}"
        if in_own_file:
            (chat / "chat_template.jinja").write_text(template)
        else:
            change(chat / "tokenizer_config.json", chat_template=template)
        before, after = tokenizer_at(plain), tokenizer_at(chat)
        assert before.chat_template.digest == ByteTokenizer().chat_template.digest == ""
        assert len(after.chat_template.digest) == len(after.digest) == 64
        assert before.digest == after.digest


SPELLED = "Say </s> to end, </s> and <|im_end|> too.\n"
BOS, END, IM_END = 0, 1, 2
HALVES = Split(0.5, 0.5, 0)


def datasets_of(source: Source, tokenizer: Path, **choice: bool) -> Data:
    chosen = TokenizerChoice(str(tokenizer), **choice)
    return open_data(source, build_tokenizer(chosen), Needs(vocab_size=300, seq_length=8))


def tokens_of(data: Data) -> np.ndarray:
    assert data.validation is not None
    return np.concatenate([blend.parts[0].tokens for blend in (data.training, data.validation)])


def preprocessed(tmp_path: Path, text: Path, *options: str) -> tuple[Dataset, str]:
    """Return the dataset of a text, and what `data preprocess` prints."""
    prefix, tokenizer = tmp_path / f"out{len(options)}", tmp_path / "tok"
    options = ("--append-eod", "--tokenizer-type", "HuggingFaceTokenizer", *options)
    files = ["--input", text, "--output-prefix", prefix, "--tokenizer-model", tokenizer]
    said = output_of("data", "preprocess", *files, *options)
    return read_indexed(f"{prefix}_text_document"), said


class TestSpecialTokens:
    @pytest.mark.parametrize("split", [True, False])
    def test_those_that_a_text_spells_out_are_text_unless_asked(self, tmp_path: Path, split: bool) -> None:
        text = tmp_path / "text.txt"
        text.write_text(SPELLED * 400)
        source = TextSource(str(text), HALVES)
        datasets = datasets_of(source, write_tokenizer(tmp_path / "tok"), split_special_tokens=split)
        tokens = tokens_of(datasets).tolist()
        assert tokens.count(END) == (1 if split else 801)
        assert tokenizer_at(tmp_path / "tok").decode([*filter(END.__ne__, tokens)]) == (
            SPELLED * 400 if split else "Say  to end,  and  too.\n" * 400
        )
        how = "text (split_special_tokens false: as tokens)" if split else "these tokens, not as text"
        assert f"; special tokens spelled out: 1200, read as {how};" in datasets.summary

    @pytest.mark.parametrize(
        ("options", "ends", "how"), [([], 1, "text"), (["--no-split-special-tokens"], 3, "these tokens")]
    )
    def test_preprocessing_has_the_same_option_and_count(
        self, options: list[str], ends: int, how: str, tmp_path: Path
    ) -> None:
        write_tokenizer(tmp_path / "tok")
        file = Path(write(tmp_path / "text.jsonl", {"text": SPELLED}))
        dataset, said = preprocessed(tmp_path, file, *options)
        assert f"special tokens spelled out: 3, read as {how}" in said
        assert dataset.tokens.tolist().count(END) == ends

    def test_template_tokens_in_messages_are_counted(self, tmp_path: Path) -> None:
        template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
        write_tokenizer(tmp_path / "tok", chat_template=template)
        chat = [{"role": "user", "content": "Say <|im_end|>"}, {"role": "assistant", "content": "No"}]
        lines = [{"messages": chat}, {"prompt": "Say </s>", "completion": " No"}]
        file = write(tmp_path / "chat.jsonl", *lines)
        records = load_records(file, tokenizer_at(tmp_path / "tok"))
        assert [record.tokens.tolist().count(IM_END) for record in records] == [3, 0]
        assert [record.tokens.tolist().count(END) for record in records] == [0, 1]
        summary = datasets_of(RecordSource(file, HALVES, packed=True), tmp_path / "tok").summary
        assert summary.endswith(
            "; special tokens spelled out: 1, read as text (split_special_tokens false: as tokens)"
            "; special tokens spelled out: 1, read as these tokens, not as text"
        )


class TestBeginningOfDocument:
    def test_each_document_of_text_begins_with_it_if_asked(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path / "tok")
        for number in range(3):
            (tmp_path / "text").mkdir(exist_ok=True)
            (tmp_path / "text" / f"{number}.txt").write_text(TEXT[0] * 4)
        source = TextSource(str(tmp_path / "text"), HALVES)
        plain = tokens_of(datasets_of(source, tmp_path / "tok"))
        tokens = tokens_of(datasets_of(source, tmp_path / "tok", prepend_bos=True))
        assert tokens[tokens != BOS].tolist() == plain.tolist()
        begins = (tokens == BOS).nonzero()[0].tolist()
        assert begins == [0, *((tokens == END).nonzero()[0] + 1).tolist()[:-1]]

    def test_long_text_begins_only_in_first_piece(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path / "tok")
        file = tmp_path / "long.txt"
        file.write_text("the fox\n" * (1 << 17))
        indexed, _ = preprocessed(tmp_path, file, "--prepend-bos")
        assert indexed.sequences > 1
        assert (indexed.tokens == BOS).nonzero()[0].tolist() == [0]

    def test_records_begin_with_it_unless_the_template_writes_it(self, tmp_path: Path) -> None:
        template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        write_tokenizer(tmp_path / "tok", chat_template=template)
        chat = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}]
        lines = [{"messages": chat}, {"prompt": "the ", "completion": "fox"}]
        file = write(tmp_path / "chat.jsonl", *lines)
        plain, begun = (
            load_records(file, tokenizer_at(tmp_path / "tok", prepend_bos=prepend))
            for prepend in (False, True)
        )
        assert begun[0].tokens.tolist() == plain[0].tokens.tolist()
        assert begun[1].tokens.tolist() == [BOS, *plain[1].tokens]
        assert begun[1].answer.tolist() == [False, *plain[1].answer]

    def test_dataset_made_otherwise_is_refused_or_reported(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path / "tok")
        file = tmp_path / "text.txt"
        file.write_text(TEXT[0])
        prefixes = [preprocessed(tmp_path, file, *options)[0].name for options in ([], ["--prepend-bos"])]
        without, begun = map(parse_prefixes, prefixes)
        for blends in ((without, begun), (begun, without)):
            with pytest.raises(ValueError, match=f"data.prepend_bos: {prefixes[0]} does not begin with BOS"):
                datasets_of(IndexedSource(*blends, None), tmp_path / "tok", prepend_bos=True)
        both = IndexedSource(begun, begun, None)
        assert "begins with BOS" not in datasets_of(both, tmp_path / "tok", prepend_bos=True).summary
        summary = datasets_of(both, tmp_path / "tok").summary
        assert f"{prefixes[1]} begins with BOS; set data.prepend_bos" in summary

    def test_a_tokenizer_without_it_is_refused(self, tmp_path: Path) -> None:
        folder = write_tokenizer(tmp_path / "tok", bos_token=None)
        with pytest.raises(ValueError, match=f"prepend_bos: tokenizer_model {folder} has no BOS; name one"):
            tokenizer_at(folder, prepend_bos=True)


def write_spaced_tokenizer(folder: Path, **config: Any) -> Path:
    """Write a tokenizer.json that begins each piece of text with a space, as those of Llama 2 do."""
    characters = ["<unk>", "<s>", "</s>", *dict.fromkeys("▁" + "".join(TEXT).replace(" ", "▁"))]
    characters += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: number for number, token in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    begin, spaces = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([begin, spaces])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path, **choice: Any) -> Any:
    """The tokenizer of a run, with a cache of its own."""
    return build_tokenizer(TokenizerChoice(str(folder), cache=str(folder.parent / "cache"), **choice))


@pytest.mark.parametrize("kind", ["bytes", "byte-level BPE", "byte fallback"])
def test_parts_of_a_text_have_its_bytes(kind: str, tmp_path: Path) -> None:
    """Wherever it is cut: also within a character."""
    makers = {"byte-level BPE": write_tokenizer, "byte fallback": write_spaced_tokenizer}
    tokenizer = read(makers[kind](tmp_path / "tok")) if kind in makers else ByteTokenizer()
    end, text = tokenizer.end_of_document, "the 日本語 🙂 end"
    tokens = np.concatenate([[end], tokenizer.encode(text), [end]])
    for cut in range(1, len(tokens)):
        halves = tokens[1:cut], tokens[cut:]
        found = [tokenizer.bytes_of(half, tokens[at]) for half, at in zip(halves, (0, cut - 1), strict=True)]
        assert sum(found) == len(text.encode()), found


class TestAutoTokenizer:
    """What AutoTokenizer reads is what training reads, and what an export reads."""

    @pytest.mark.parametrize("begins", [False, True])
    @pytest.mark.parametrize("spaced", [False, True])
    def test_training_and_export_read_as_auto_tokenizer(
        self, tmp_path: Path, begins: bool, spaced: bool
    ) -> None:
        """Whatever class, additions and truncation the files name."""
        write = write_spaced_tokenizer if spaced else write_tokenizer
        pad = {"pad_token": "[PAD]"}
        folder = write(tmp_path / "tok", add_bos_token=not begins, tokenizer_class="LlamaTokenizer", **pad)
        change(folder / "tokenizer.json", truncation={
            "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
        })  # fmt: skip
        ours = read(folder, prepend_bos=begins, split_special_tokens=False)
        ours.save(tmp_path / "export", max_length=64)
        assert check_exported(tmp_path / "export", ours) == ""
        assert read(tmp_path / "export").adds_bos == begins
        theirs = [
            transformers.AutoTokenizer.from_pretrained(place) for place in (folder, tmp_path / "export")
        ]
        for text in (" the  end ", "   def f(x):\n\n\treturn x\n", "é e\u0301 中", "[PAD]the</s> fox"):
            tokens = ours.encode(text).tolist()
            assert [one(text, add_special_tokens=False).input_ids for one in theirs] == [tokens] * 2
            assert theirs[1](text).input_ids == [*ours.before_document, *tokens]

    def test_the_kept_folder_is_read_without_transformers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By all other processes of a host, and from the copy in the folder of a run."""
        folder = write_spaced_tokenizer(tmp_path / "tok", tokenizer_class="LlamaTokenizer", legacy=False)
        first = read(folder)
        write_copy(first.kept, tmp_path / "copy")
        monkeypatch.setitem(sys.modules, "transformers", None)  # what imports it raises
        for place in (folder, tmp_path / "copy"):
            again = read(place)
            assert again.digest == first.digest
            assert again.content == first.content
        change(folder / "tokenizer_config.json", eos_token="<s>")
        with pytest.raises(ModuleNotFoundError):
            read(folder)

    @pytest.mark.parametrize("rate", [0.1, 0.005])
    def test_what_draws_tokens_is_switched_off_and_told(self, rate: float, tmp_path: Path) -> None:
        folder = write_tokenizer(tmp_path / "tok")
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        plain = read(write_tokenizer(tmp_path / "plain"))
        change(folder / "tokenizer.json", model=model | {"dropout": rate})
        assert read(folder).digest == plain.digest
        (tmp_path / "text.txt").write_text(TEXT[0] * 9)
        note = f"; switched off in the tokenizer, which draws tokens at random: dropout {rate:g}"
        assert note in datasets_of(TextSource(str(tmp_path / "text.txt"), HALVES), folder).summary

    @pytest.mark.skipif(transformers.__version__ < "5", reason="AutoTokenizer obeys the files before")
    def test_family_with_own_tokenizer_class_is_named(self, tmp_path: Path) -> None:
        """The export itself is right: it is read by its files."""
        ByteTokenizer().save(tmp_path, max_length=64)
        assert check_exported(tmp_path, ByteTokenizer()) == ""
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
        note = check_exported(tmp_path, ByteTokenizer())
        assert "for this family AutoTokenizer takes Qwen2Tokenizer" in note

    def test_a_class_without_fast_tokenizer_is_named(self, tmp_path: Path) -> None:
        class Slow:
            """As transformers' classes in Python: without `backend_tokenizer`."""

        ByteTokenizer().save(tmp_path, max_length=64)
        with patch("megatron_noloco.data.auto_tokenizer.load_folder", lambda _: Slow()):
            note = check_exported(tmp_path, ByteTokenizer())
        assert "for this family AutoTokenizer takes Slow, which reads other tokens" in note

    @pytest.mark.parametrize(
        ("name", "content", "line"),
        [
            ("tokenizer_config.json", "[1]", "transformers cannot read it"),
            ("tokenizer_config.json", "{}", "no end-of-document token; name it as eos_token in its tok"),
            ("tokenizer.json", "{}", "transformers cannot read it"),
        ],
    )
    def test_broken_files_are_one_line(self, tmp_path: Path, name: str, content: str, line: str) -> None:
        folder = write_tokenizer(tmp_path / "tok")
        (folder / name).write_text(content)
        for place, said in ((folder, line), (folder / name, "no folder with a tokenizer.json")):
            with pytest.raises(ValueError, match=f"^tokenizer_model {place}: {said}") as caught:
                read(place)
            assert "\n" not in str(caught.value)


LOST = "日本語éüñßøΩЖ€"


class TestLostCharacters:
    """Characters that no token stands for are counted; many of them are refused."""

    @pytest.mark.parametrize("unknown", [None, "<unk>"], ids=["dropped", "unknown"])
    def test_they_are_counted_and_refused(self, unknown: str | None, tmp_path: Path) -> None:
        tokenizer = Tokenizer(models.BPE(unk_token=unknown))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        special = ["</s>", *([unknown] if unknown else [])]
        trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=special, show_progress=False)
        tokenizer.train_from_iterator(["the quick brown fox, over the lazy dog"], trainer)
        (tmp_path / "tok").mkdir()
        tokenizer.save(str(tmp_path / "tok" / "tokenizer.json"))
        (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        lines = [
            f"the quick fox {LOST + 'ЖЖ語' if place == 3 else 'dog'} over the lazy\n" for place in range(20)
        ]
        (tmp_path / "text.txt").write_text("".join(lines))
        unread = {"id": LOST * 99, "source": "the fox" * 999}
        file = write(
            tmp_path / "a.jsonl", *({"prompt": "the fox", "completion": line} | unread for line in lines)
        )
        examples = "such as 'Ж' in {0}, '語' in {0}, '日' in {0}"  # the most frequent, then the first
        for source in (
            TextSource(str(tmp_path / "text.txt"), HALVES),
            RecordSource(file, HALVES, packed=False),
        ):
            characters = sum(map(len, lines)) + (7 * 20 if isinstance(source, RecordSource) else 0)
            told = f"no token stands for 14 of {characters} characters"
            summary = datasets_of(source, tmp_path / "tok").summary
            assert told in summary
            assert examples.format(Path(source.path).name) in summary
            with pytest.raises(
                ValueError, match=rf"^{source.option} .*: {told} .*max_lost_characters \(now 0.01\)"
            ):
                datasets_of(replace(source, max_lost=0.01), tmp_path / "tok")

    def test_bytes_and_spaces_lose_nothing(self, tmp_path: Path) -> None:
        for folder in (write_tokenizer(tmp_path / "bytes"), write_spaced_tokenizer(tmp_path / "fallback")):
            assert read(folder).count_lost(["the \n\t fox", TEXT[0]]).total() == 0
        assert read(tmp_path / "bytes").count_lost([LOST, "", "a\0b"]).total() == 0


def run_with(tokenizer: Path, output: Path, **data: Any) -> RunConfig:
    named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer)}
    training = SMALLEST["training"] | {"output_dir": str(output)}
    return RunConfig(**SMALLEST | {"data": {"text": "text"} | named | data, "training": training})


def settings_of(run: RunConfig, tokenizer: Path, data: int = 7) -> CheckpointSettings:
    return checkpoint_settings(run, Topology(), {"training_data": data}, tokenizer_at(tokenizer))


class TestCopy:
    """A run keeps its tokenizer, and continues with one that reads the same tokens, wherever it lies."""

    def test_it_is_used_where_the_original_is_gone(self, tmp_path: Path) -> None:
        original = write_tokenizer(tmp_path / "tok", chat_template="{{ messages }}")
        run = run_with(original, tmp_path / "run")
        copy, kept = tokenizer_folder(tmp_path / "run"), read(original)
        settings = checkpoint_settings(run, Topology(), {}, kept)
        write_copy(kept.kept, copy)
        shutil.rmtree(original)
        after = _tokenizer(run, [tmp_path / "run"])
        assert {TOKENS: after.digest, TEMPLATE: after.chat_template.digest} == settings.tokenizer
        write_copy(after.kept, copy)  # which is its own place
        assert tokenizer_at(copy).digest == after.digest

    def test_another_tokenizer_takes_its_place(self, tmp_path: Path) -> None:
        original, other = write_tokenizer(tmp_path / "tok"), write_tokenizer(tmp_path / "other", pieces=21)
        for folder in (original, other):
            write_copy(tokenizer_at(folder).kept, tmp_path / "copy")
            assert tokenizer_at(tmp_path / "copy").digest == tokenizer_at(folder).digest

    def test_a_saved_run_takes_the_place_that_has_its_tokens(self, tmp_path: Path) -> None:
        right, wrong = write_tokenizer(tmp_path / "right"), write_tokenizer(tmp_path / "wrong", pieces=21)
        choice = TokenizerChoice(str(wrong))
        digest = tokenizer_at(right).digest
        assert find_tokenizer(choice, [tmp_path / "none", right], digest).digest == digest
        with pytest.raises(ValueError, match=f"^{wrong}: reads other tokens than the run$"):
            find_tokenizer(choice, [], digest)

    def test_a_resume_compares_tokens_not_paths(self, tmp_path: Path) -> None:
        first, same = write_tokenizer(tmp_path / "first"), write_tokenizer(tmp_path / "same")
        saved = settings_of(run_with(first, tmp_path / "run"), first)
        moved = settings_of(run_with(same, tmp_path / "run"), same)
        (line,) = moved.changes(saved.run, {}, tokenizer=saved.tokenizer)
        assert line.startswith("data.tokenizer_model:")
        write_tokenizer(same, pieces=21)
        changed = settings_of(run_with(same, tmp_path / "run"), same)
        with pytest.raises(ValueError, match=f"tokenizer_model: {same} reads texts as other tokens"):
            changed.changes(moved.run, {}, tokenizer=saved.tokenizer)
        assert {*saved.tokenizer} == {TOKENS, TEMPLATE}

    def test_another_split_alone_is_blamed_for_other_contents(self, tmp_path: Path) -> None:
        folder = write_tokenizer(tmp_path / "tok")
        before = run_with(folder, tmp_path / "run", text="here", split="8,2")
        now = settings_of(run_with(folder, tmp_path / "run", text="there", split="7,3"), folder, 8)
        with pytest.raises(ValueError, match=r"^data.split: .*; a resume cannot change it: [^\n]*$"):
            now.changes(before.to_dict(), {"training_data": 7.0})

    def test_without_digests_another_path_is_refused_as_before(self, tmp_path: Path) -> None:
        first, same = write_tokenizer(tmp_path / "first"), write_tokenizer(tmp_path / "same")
        saved, moved = (settings_of(run_with(folder, tmp_path / "run"), folder) for folder in (first, same))
        with pytest.raises(ValueError, match=r"data.tokenizer_model: .* cannot change it"):
            moved.changes(saved.run, {})
