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


def test_a_config_in_another_encoding_is_one_line(tmp_path: Path) -> None:
    """As texts and rows: tests/golden/data_lines.txt."""
    refusal = refusal_of("config", "--check", written(tmp_path / "run.json", CONFIG, "utf-16"))
    assert "run.json: not UTF-8 text: it begins as UTF-16" in refusal


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
