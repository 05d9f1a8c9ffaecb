"""What decides the tokens of a text is known of a tokenizer, and the same wherever the tokenizer is read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron_noloco.checkpoint.run_settings import TEMPLATE, TOKENS, CheckpointSettings, tokenizer_folder
from megatron_noloco.config import RunConfig
from megatron_noloco.data.auto_tokenizer import check_exported, check_folder, folder_adds_bos, folder_problem
from megatron_noloco.data.fast_tokenizer import FastTokenizer
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
from megatron_noloco.data.tokenizer import ByteTokenizer, TokenizerChoice, build_tokenizer, find_tokenizer
from megatron_noloco.plans.topology import Topology
from megatron_noloco.training.joined import checkpoint_settings
from megatron_noloco.training.prepare import _tokenizer
from tests.harness import output_of
from tests.unit.configs import SMALLEST
from tests.unit.datasets import load_records
from tests.unit.test_records import write

TEXT = ["The fox went, the fox came again.", "def fox(the):\n    return the + 1\n"]


def write_tokenizer(folder: Path, pieces: int = 20, **config: Any) -> Path:
    """Write a byte-level BPE tokenizer that names a BOS, and that adds it by its post-processor."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + pieces,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


class TestDigest:
    def test_it_is_that_of_the_content_not_of_the_file(self, tmp_path: Path) -> None:
        """Order, indents, fields that newer files have, what texts are cut or padded to decide no token."""
        first = FastTokenizer(write_tokenizer(tmp_path / "first"))
        file = write_tokenizer(tmp_path / "second") / "tokenizer.json"
        content = json.loads(file.read_text())
        del content["model"]["ignore_merges"]
        content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
        cut = {"max_length": 4, "strategy": "LongestFirst", "stride": 0}
        filled = {"strategy": {"Fixed": 99}, "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
        content["truncation"], content["padding"] = (one | {"direction": "Right"} for one in (cut, filled))
        file.write_text(json.dumps(dict(reversed(content.items()))))
        second = FastTokenizer(file.parent)
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
        digests = [FastTokenizer(folder).digest for folder in folders] + [ByteTokenizer().digest]
        assert len({*digests}) == len(digests)

    def test_other_merges_or_rules_are_another_tokenizer(self, tmp_path: Path) -> None:
        ours, merged, normalized = (write_tokenizer(tmp_path / name) for name in "abc")
        model = json.loads((merged / "tokenizer.json").read_text())["model"]
        change(merged / "tokenizer.json", model=model | {"merges": model["merges"][::-1]})
        change(normalized / "tokenizer.json", normalizer={"type": "NFC"})
        same, *others = (FastTokenizer(folder) for folder in (ours, merged, normalized))
        assert same.extends(FastTokenizer(ours))
        assert all(other.vocabulary == same.vocabulary and not other.extends(same) for other in others)

    @pytest.mark.parametrize("in_own_file", [False, True])
    def test_a_template_has_one_of_its_own(self, tmp_path: Path, in_own_file: bool) -> None:
        plain, chat = write_tokenizer(tmp_path / "plain"), write_tokenizer(tmp_path / "chat")
        template = "{{ bos_token }}{{ messages[0].content }}"
        if in_own_file:
            (chat / "chat_template.jinja").write_text(template)
        else:
            change(chat / "tokenizer_config.json", chat_template=template)
        before, after = FastTokenizer(plain), FastTokenizer(chat)
        assert before.chat_template.digest == ByteTokenizer().chat_template.digest == ""
        assert len(after.chat_template.digest) == len(after.digest) == 64
        assert before.digest == after.digest


SPELLED = "Say </s> to end, </s> and <|im_end|> too.\n"
BOS, END, IM_END = 0, 1, 2
HALVES = Split(0.5, 0.5, 0)


def datasets_of(source: Source, tokenizer: Path, **choice: bool) -> Data:
    chosen = TokenizerChoice(str(tokenizer), **choice)
    return open_data(source, build_tokenizer(chosen), Needs(vocab_size=300, seq_length=8))


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
        text.write_text(SPELLED * 4)
        source = TextSource(str(text), HALVES)
        datasets = datasets_of(source, write_tokenizer(tmp_path / "tok"), split_special_tokens=split)
        tokens = datasets.training.parts[0].tokens.tolist()
        assert tokens.count(END) == (1 if split else 5)
        assert FastTokenizer(tmp_path / "tok").decode([*filter(END.__ne__, tokens)]) == (
            SPELLED * 2 if split else "Say  to end,  and  too.\n" * 2
        )
        how = "read as text" if split else "read as these tokens, not as text"
        assert datasets.summary.endswith(f"; special tokens spelled out: 12, {how}")

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
        records = load_records(file, FastTokenizer(tmp_path / "tok"))
        assert [record.tokens.tolist().count(IM_END) for record in records] == [3, 0]
        assert [record.tokens.tolist().count(END) for record in records] == [0, 1]
        summary = datasets_of(RecordSource(file, HALVES, packed=True), tmp_path / "tok").summary
        assert summary.endswith(
            "; special tokens spelled out: 1, read as text"
            "; special tokens spelled out: 1, read as these tokens, not as text"
        )


class TestBeginningOfDocument:
    def test_each_document_of_text_begins_with_it_if_asked(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path / "tok")
        for number in range(3):
            (tmp_path / "text").mkdir(exist_ok=True)
            (tmp_path / "text" / f"{number}.txt").write_text(TEXT[0] * 4)
        source = TextSource(str(tmp_path / "text"), HALVES)
        plain = datasets_of(source, tmp_path / "tok").training.parts[0].tokens
        tokens = datasets_of(source, tmp_path / "tok", prepend_bos=True).training.parts[0].tokens
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
            load_records(file, FastTokenizer(tmp_path / "tok", prepend_bos=prepend))
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
            FastTokenizer(folder, prepend_bos=True)


def write_spaced_tokenizer(folder: Path, **config: Any) -> Path:
    """Write a tokenizer.json that begins each piece of text with a space, as those of Llama 2 do."""
    characters = ["<unk>", "<s>", "</s>", *dict.fromkeys("▁" + "".join(TEXT).replace(" ", "▁"))]
    vocabulary = {token: number for number, token in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    begin, spaces = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([begin, spaces])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class TestAutoTokenizer:
    """The tokens of training, and of transformers."""

    def test_class_ignoring_tokenizer_rules_is_found(self, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        folder = write_spaced_tokenizer(tmp_path / "tok", tokenizer_class="LlamaTokenizer", legacy=False)
        with pytest.raises(ValueError, match=r"tok: its tokenizer.json reads '.*' as \[.*\], AutoTok"):
            check_folder(FastTokenizer(folder))
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "theirs")
        check_folder(FastTokenizer(tmp_path / "theirs"))
        change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        check_folder(FastTokenizer(folder))

    def test_a_token_that_only_the_config_names_is_found(self, tmp_path: Path) -> None:
        assert folder_problem(FastTokenizer(write_tokenizer(tmp_path / "tok"))) == ""
        more = FastTokenizer(write_tokenizer(tmp_path / "more", pad_token="[PAD]"))
        assert "reads '[PAD]the' as" in folder_problem(more)

    @pytest.mark.parametrize("of_today", [False, True])
    def test_token_of_two_files_counts_as_in_transformers(self, tmp_path: Path, of_today: bool) -> None:
        """In the export, too. Folders of today have `added_tokens_decoder`, and the older file is not read."""
        folder = write_tokenizer(tmp_path / "tok", **({"added_tokens_decoder": {}} if of_today else {}))
        end = {"content": "<|im_end|>", "lstrip": False}
        named = {"eos_token": end, "bos_token": "<|im_end|>", "additional_special_tokens": ["<s>"]}
        (folder / "special_tokens_map.json").write_text(json.dumps(named))
        ours = FastTokenizer(folder)
        ours.save(tmp_path / "export", max_length=64)
        assert ours.end_of_document == (END if of_today else IM_END)
        for place in (folder, tmp_path / "export"):
            theirs = transformers.AutoTokenizer.from_pretrained(place)
            assert theirs.eos_token_id == ours.end_of_document
            assert theirs.bos_token_id == ours.beginning_of_document

    @pytest.mark.parametrize("begins", [False, True])
    @pytest.mark.parametrize("spaced", [False, True])
    def test_export_reads_and_adds_bos_as_training(self, tmp_path: Path, begins: bool, spaced: bool) -> None:
        """Whatever class and whatever additions the files of the tokenizer say."""
        write = write_spaced_tokenizer if spaced else write_tokenizer
        folder = write(tmp_path / "tok", add_bos_token=not begins, tokenizer_class="LlamaTokenizer")
        change(folder / "tokenizer.json", truncation={
            "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
        })  # fmt: skip
        tokenizer = FastTokenizer(folder, prepend_bos=begins)
        tokenizer.save(tmp_path / "export", max_length=64)
        check_exported(tokenizer, tmp_path / "export")
        assert folder_adds_bos(tmp_path / "export") == begins
        other = FastTokenizer(folder, prepend_bos=not begins)
        with pytest.raises(ValueError, match="training reads 'Byte by byte"):
            check_exported(other, tmp_path / "export")

    @pytest.mark.parametrize("special", [True, False])
    def test_a_token_that_only_the_config_adds_is_another_token(self, special: bool, tmp_path: Path) -> None:
        plain = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
        token = {"content": "<tool>", "special": special} | plain
        folder = write_tokenizer(tmp_path / "tok")
        added = {str(FastTokenizer(folder).vocab_size): token}
        change(folder / "tokenizer_config.json", added_tokens_decoder=added)
        assert "reads '<tool>the' as" in folder_problem(FastTokenizer(folder))

    @pytest.mark.skipif(transformers.__version__ < "5", reason="AutoTokenizer obeys the files before")
    def test_family_with_own_tokenizer_class_is_named(self, tmp_path: Path) -> None:
        """The export itself is right: it is read by its files."""
        ByteTokenizer().save(tmp_path, max_length=64)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
        note = check_exported(ByteTokenizer(), tmp_path)
        assert "AutoTokenizer as [195, 169" in note, note  # it joins an accent with its letter
        assert "load the tokenizer with PreTrainedTokenizerFast" in note

    def test_bytes_are_exported_without_bos(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Nor does transformers warn of the texts that are compared, longer than the model's context."""
        transformers.logging.set_verbosity_warning()
        transformers.logging.enable_propagation()
        ByteTokenizer().save(tmp_path, max_length=8)
        assert check_exported(ByteTokenizer(), tmp_path) == ""
        assert not caplog.records
        assert not folder_adds_bos(tmp_path)
        written = json.loads((tmp_path / "tokenizer_config.json").read_text())
        assert written["tokenizer_class"] == "PreTrainedTokenizerFast", (
            "which all versions of transformers have"
        )


def run_with(tokenizer: Path, output: Path, **data: Any) -> RunConfig:
    named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer)}
    training = SMALLEST["training"] | {"output_dir": str(output)}
    return RunConfig(**SMALLEST | {"data": {"text": "text"} | named | data, "training": training})


def settings_of(run: RunConfig, tokenizer: Path, data: int = 7) -> CheckpointSettings:
    return checkpoint_settings(run, Topology(), {"training_data": data}, FastTokenizer(tokenizer))


class TestCopy:
    """A run keeps its tokenizer, and continues with one that reads the same tokens, wherever it lies."""

    def test_it_is_used_where_the_original_is_gone(self, tmp_path: Path) -> None:
        original = write_tokenizer(tmp_path / "tok", chat_template="{{ messages }}")
        run = run_with(original, tmp_path / "run")
        settings, copy = settings_of(run, original), tokenizer_folder(tmp_path / "run")
        FastTokenizer(original).copy_to(copy)
        shutil.rmtree(original)
        after = _tokenizer(run)
        assert {TOKENS: after.digest, TEMPLATE: after.chat_template.digest} == settings.tokenizer
        after.copy_to(copy)  # which is its own place
        assert FastTokenizer(copy).digest == after.digest

    def test_another_tokenizer_takes_its_place(self, tmp_path: Path) -> None:
        original, other = write_tokenizer(tmp_path / "tok"), write_tokenizer(tmp_path / "other", pieces=21)
        for folder in (original, other):
            FastTokenizer(folder).copy_to(tmp_path / "copy")
            assert FastTokenizer(tmp_path / "copy").digest == FastTokenizer(folder).digest

    def test_a_saved_run_takes_the_place_that_has_its_tokens(self, tmp_path: Path) -> None:
        right, wrong = write_tokenizer(tmp_path / "right"), write_tokenizer(tmp_path / "wrong", pieces=21)
        choice = TokenizerChoice(str(wrong))
        digest = FastTokenizer(right).digest
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

    @pytest.mark.parametrize("data", [7, 8])
    def test_a_checkpoint_of_before_read_special_tokens_as_tokens(self, tmp_path: Path, data: int) -> None:
        """Its data stay as they were: where they hold none the setting may change, otherwise it must not."""
        folder = write_tokenizer(tmp_path / "tok")
        now = settings_of(run_with(folder, tmp_path / "run"), folder, data)
        saved = json.loads(json.dumps(now.run))
        del saved["data"]["split_special_tokens"]
        counters = {"training_data": 7.0}
        if data == 7:
            (line,) = now.changes(saved, counters)
            assert line == "data.split_special_tokens: false in the checkpoint, true now"
        else:
            with pytest.raises(ValueError, match="true now, with other contents; a resume cannot change it"):
                now.changes(saved, counters)
