"""What decides the tokens of a text is known of a tokenizer, and the same wherever the tokenizer is read."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megatron_noloco.data.tokenizer import ByteTokenizer, FastTokenizer

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
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


class TestDigest:
    def test_it_is_that_of_the_content_not_of_the_file(self, tmp_path: Path) -> None:
        """Order, indents, fields that newer files have, and what texts are cut to decide no token."""
        first = FastTokenizer(write_tokenizer(tmp_path / "first"))
        file = write_tokenizer(tmp_path / "second") / "tokenizer.json"
        content = json.loads(file.read_text())
        del content["model"]["ignore_merges"]
        content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
        content["truncation"] = {
            "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
        }  # fmt: skip
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

    @pytest.mark.parametrize("in_own_file", [False, True])
    def test_a_template_has_one_of_its_own(self, tmp_path: Path, in_own_file: bool) -> None:
        plain, chat = write_tokenizer(tmp_path / "plain"), write_tokenizer(tmp_path / "chat")
        template = "{{ bos_token }}{{ messages[0].content }}"
        if in_own_file:
            (chat / "chat_template.jinja").write_text(template)
        else:
            change(chat / "tokenizer_config.json", chat_template=template)
        before, after = FastTokenizer(plain), FastTokenizer(chat)
        assert before.template_digest == ByteTokenizer().template_digest == ""
        assert len(after.template_digest) == len(after.digest) == 64
        assert before.digest == after.digest
