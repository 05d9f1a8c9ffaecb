"""Files as other programs write them: byte order marks, UTF-16, suffixes in capitals, JSON over several lines."""

import gzip
import json
from pathlib import Path

import pytest

from megatron_noloco.config import load_config
from megatron_noloco.data.tokenizer import ByteTokenizer
from tests.kit.configs import SMALLEST
from tests.kit.datasets import TEXTS, documents, expected, load_records, load_text, run, write_jsonl, zstd
from tests.kit.ranks import refusal_of

BYTES = ByteTokenizer()
RECORD = json.dumps({"prompt": "a", "completion": "b"})
CONFIG = json.dumps(SMALLEST | {"data": {"text": "a.txt", "split": "1,0,0"}, "evaluation": {"iters": 0}})
UTF_16 = ["utf-16", "utf-16-le", "utf-16-be", "utf-32"]


def written(path: Path, text: str, encoding: str) -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def read_text(path: Path) -> str:
    return BYTES.decode(load_text(str(path), "1", BYTES).train)


def test_a_byte_order_mark_is_no_part_of_what_is_read(tmp_path: Path) -> None:
    text = written(tmp_path / "a.txt", "Größe\n", "utf-8-sig")
    assert read_text(text) == "Größe\n"
    lines = written(tmp_path / "a.jsonl", json.dumps({"text": "Größe\n"}), "utf-8-sig")
    for number, path in enumerate((text, lines)):
        assert documents(run(tmp_path / str(number), [path])) == expected(["Größe\n"])
    (record,) = load_records(str(written(tmp_path / "r.jsonl", RECORD, "utf-8-sig")), BYTES)
    assert BYTES.decode(record.tokens) == "ab"
    assert load_config(written(tmp_path / "run.json", CONFIG, "utf-8-sig")).data.text == "a.txt"


@pytest.mark.parametrize("encoding", UTF_16)
def test_another_encoding_is_named_in_one_line(encoding: str, tmp_path: Path) -> None:
    line = f"not UTF-8 text: it begins as {encoding[:6].upper()}.* does .iconv -f "
    text = written(tmp_path / "a.txt", "Text\n", encoding)
    records = written(tmp_path / "a.jsonl", RECORD + "\n", encoding)
    doors = {
        f"{text}: {line}": [lambda: read_text(text), lambda: run(tmp_path, [text])],
        f"{records}, line 1: {line}": [
            lambda: load_records(str(records), BYTES),
            lambda: run(tmp_path, [records]),
        ],
    }
    for said, calls in doors.items():
        for call in calls:
            with pytest.raises(ValueError, match=f"^{said}"):
                call()
    refusal = refusal_of("config", "--check", written(tmp_path / "run.json", CONFIG, encoding))
    assert f"run.json: not UTF-8 text: it begins as {encoding[:6].upper()}" in refusal


@pytest.mark.parametrize("encoding", UTF_16)
def test_in_a_folder_another_encoding_is_left_out_and_counted(encoding: str, tmp_path: Path) -> None:
    written(tmp_path / "a.txt", "Text\n", "utf-8")
    written(tmp_path / "b.txt", "Text\n", encoding)
    corpus = load_text(str(tmp_path), "1", BYTES)
    assert corpus.files == 1
    assert "1 file not in UTF-8 (b.txt)" in corpus.notes


@pytest.mark.parametrize("name", ["a.JSONL", "a.jsonl.GZ", "a.Jsonl.Zst"])
def test_suffixes_in_capitals(name: str, tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "source", TEXTS).read_bytes()
    records = (RECORD + "\n").encode()
    for folder, content in (("texts", lines), ("records", records)):
        (tmp_path / folder).mkdir()
        packed = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix.lower(), bytes)(content)
        (tmp_path / folder / name).write_bytes(packed)
    assert documents(run(tmp_path, [tmp_path / "texts" / name])) == expected(TEXTS)
    for path in (tmp_path / "records", tmp_path / "records" / name):
        (record,) = load_records(str(path), BYTES)
        assert BYTES.decode(record.tokens) == "ab"
