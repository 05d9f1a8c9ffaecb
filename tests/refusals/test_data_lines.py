"""What is said of data that cannot be read: tests/golden/data_lines.txt has the line of each."""

import gzip
import json
import lzma
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megatron_noloco.config import RunConfig
from megatron_noloco.data.opening import open_data
from megatron_noloco.data.sources import Needs
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.errors import UserError
from tests.kit.chats import ANSWER, ASKED, CALLS, TEMPLATE, chat_tokenizer, write
from tests.kit.configs import SMALLEST
from tests.kit.datasets import LFS_POINTER, load_records, write_dataset, zstd
from tests.kit.golden import check
from tests.kit.ranks import output_of, refusal_of
from tests.kit.tokenizers import tokenizer_at


def parquet_of(text: bytes, columns: int = 1) -> bytes:
    """A file with columns of text, all of one name, which Parquet does not check."""
    written, column = pyarrow.BufferOutputStream(), pyarrow.array([b"x", text]).view(pyarrow.string())
    parquet.write_table(pyarrow.table([column] * columns, names=["text"] * columns), written)
    return written.getvalue().to_pybytes()


# Name of a file, its content, further options of `data preprocess`.
WRONG: list[tuple[str, bytes, tuple[str, ...]]] = [
    # lines of JSON
    ("line.jsonl", b'{"text": "x"}\n{"text": \n', ()),
    ("number.jsonl", b"1\n", ()),
    ("nested.jsonl", b'{"text": ' * 9999, ()),
    ("zeros.jsonl", b'{"text": "x"}\n' + bytes(9), ()),
    ("key.jsonl", b'{"body": "x"}\n', ()),
    ("twice.jsonl", b'{"text": "one"}\n{"text": "two", "of": {"id": 1, "id": 2}}\n', ()),
    ("kind.jsonl", b'{"text": 3}\n', ()),
    ("half.jsonl", b'{"text": "x"}\n{"text": "\\ud83d"}\n', ()),
    ("list.json", b'[{"text": "a"}]', ()),
    ("lines.json", b'{\n "text": "a"\n}', ()),
    ("two.json", b'{"text": "a"} {"text": "b"}', ()),
    ("empty.jsonl", b'{"text": ""}\n', ()),
    # text
    ("archive.tar", b"text" + bytes(9), ()),
    ("archive.tar.gz", gzip.compress(b"text" + bytes(9)), ()),
    ("latin.txt", b"caf\xe9", ()),
    ("late.txt", b"text\n" * 200_000 + b"\xe9", ()),
    ("latin.txt.gz", gzip.compress(b"caf\xe9"), ()),
    ("cut.txt", "text é".encode()[:-1], ()),
    ("empty.txt", b"", ()),
    ("utf-16.txt", "text\n".encode("utf-16"), ()),
    ("utf-16-le.jsonl", '{"text": "x"}\n'.encode("utf-16-le"), ()),
    ("utf-16-be.txt", "text\n".encode("utf-16-be"), ()),
    ("utf-32.jsonl", '{"text": "x"}\n'.encode("utf-32"), ()),
    # formats
    ("text.txt.xz", lzma.compress(b"text"), ()),
    ("rows.csv", b"text,label\none,1\n", ()),
    ("rows.TSV.gz", gzip.compress(b"text\tlabel\n"), ()),
    ("pointer.parquet", LFS_POINTER, ()),
    ("lines.txt", b'\xef\xbb\xbf{"messages": []}\n{"messages": []}\n', ()),
    ("cut.jsonl.gz", gzip.compress(b"x" * 99)[:-9], ()),
    ("cut.txt.zst", zstd(bytes(range(256)) * 40)[:200], ()),
    ("plain.parquet", b"plain", ()),
    ("columns.parquet", parquet_of(b"x", columns=2), ()),
    ("latin.parquet", parquet_of(b"\xff"), ()),
    ("rows.parquet", parquet_of(b"x"), ("--json-keys", "body")),
    ("plain.arrow", b"plain", ()),
    # options
    ("a.jsonl", b"{}", ("--json-keys", "a/b")),
    ("b.jsonl", b"{}", ("--output-prefix", "/")),
    ("c.jsonl", b"{}", ("--input", "nowhere")),
    ("d.jsonl", b'{"text": "x"}', ("--output-prefix", "d.jsonl/out")),
    ("e.jsonl", b'{"text": "x"}', ("--input", ".", "--output-prefix", "out")),
    ("f.jsonl", b"{}", ("--tokenizer-model", "nowhere")),
    ("g.jsonl", b"{}", ("--tokenizer-model", ".")),
]


def test_each_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit code 2, and without a dataset."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def cases() -> Iterator[tuple[str, str]]:
        for number, (name, content, options) in enumerate(WRONG):
            folder = tmp_path / str(number)
            folder.mkdir()
            monkeypatch.chdir(folder)
            (folder / name).write_bytes(content)
            given = ["--input", name, "--output-prefix", "out/a", *options]
            said = refusal_of("data", "preprocess", *given).replace(str(folder), "FOLDER")
            assert len(said.splitlines()) == 1
            assert not list(folder.glob("**/*.idx"))
            yield " ".join([name, *options]), said

    check("data_lines", cases())


CHANGED = TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1] | lower")
SILENT = TEMPLATE.replace("message['content']", "message['content'] if message.role != 'system'")
THINKING = TEMPLATE.replace("%}<assistant>{% endif", "%}<assistant><think>{% endif")
TWICE = TEMPLATE.replace("<{{ message['role'] }}>", "{% if loop.index < 3 %}<{{ message.role }}>{% endif %}")
STRICT = "{% for message in messages if message.role == 'refused' %}{{ 1 + '' }}{% endfor %}" + TEMPLATE
CHAT_TEMPLATES = {
    "strict": STRICT,
    "changing": CHANGED,
    "silent": SILENT,
    "thinking": THINKING,
    "twice": TWICE,
    "tools": "{{ tools }}" + CALLS,
    "tools of messages": "{{ messages[0].tools }}" + TEMPLATE,  # as in Phi-4-mini
    "none": "",
}
IMAGE = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "b"}]


def chat(*messages: Any, **others: Any) -> dict[str, Any]:
    return {"messages": [ASKED, *messages], **others}


# A chat template, and a record.
WRONG_RECORDS: list[tuple[str, Any]] = [
    # what is no record, or says more than is read
    ("strict", {"text": "a", "completion": None}),
    ("strict", {"conversations": [{"from": "human"}]}),
    ("strict", {"prompt": [ASKED], "completion": "a"}),
    ("strict", {"messages": []}),
    ("strict", {"query": "a text that fills the line, with the next ones, to its end", "reply": "b"}),
    ("strict", {"conversations": [{"from": "human", "value": "a"}, "b"]}),
    ("strict", {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ("strict", {"prompt": "a", "completion": "b", "label": True}),
    ("strict", [ASKED, ANSWER]),
    ("strict", chat(ANSWER, functions=[{"name": "f"}])),
    ("strict", chat(ANSWER, system="a")),
    ("strict", {"prompt": "a", "completion": "b", "system": "c"}),
    ("strict", {"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}),
    ("strict", chat(ANSWER, prompt="a", completion="b")),
    ("strict", chat(ANSWER, weight=0)),
    ("strict", {"prompt": "a", "completion": "b", "weight": 0}),
    ("strict", {"prompt": "\ud800", "completion": "a"}),
    ("tools", chat(ANSWER, tools=[{"\ud800": 1}])),
    # messages
    ("strict", {"messages": ["hello"]}),
    ("strict", {"messages": [{"from": "human", "value": "a"}]}),
    ("strict", chat()),
    ("strict", {"messages": [ANSWER]}),
    ("strict", chat({**ANSWER, "role": "refused"}, ANSWER)),
    ("strict", chat({"role": "assistant", "text": "three"})),
    ("strict", chat({**ANSWER, "thoughts": "a"})),
    ("strict", chat({**ANSWER, "tool_calls": [1]})),
    ("strict", chat({"role": "assistant", "content": 0})),
    ("strict", chat({"role": "assistant", "content": {"a": 1}})),
    ("strict", chat({"role": "assistant", "content": IMAGE})),
    ("strict", chat({**ANSWER, "weight": 0.5})),
    ("strict", chat({**ASKED, "weight": 1})),
    ("strict", chat({**ANSWER, "weight": 0})),
    # what a template does not write
    ("none", chat(ANSWER)),
    ("thinking", chat(ANSWER)),
    ("silent", chat(ANSWER, {"role": "system", "content": "be brief"}, ASKED, ANSWER)),
    ("changing", chat({**ANSWER, "content": "a</think>b"})),
    ("changing", {"messages": [{**ASKED, "content": "Two"}, {**ANSWER, "content": "two"}]}),
    ("twice", chat(ANSWER, ANSWER)),
    # tools and their calls
    ("strict", chat(ANSWER, tools=[{"name": "f"}])),
    ("tools of messages", chat(ANSWER, tools=[{"name": "f"}])),
]


def test_each_record_is_one_line(tmp_path: Path) -> None:
    """Which names file and row: tests/golden/record_lines.txt."""

    def cases() -> Iterator[tuple[str, str]]:
        for name, template in CHAT_TEMPLATES.items():
            chat_tokenizer(tmp_path / name, template)
            if not template:
                (tmp_path / name / "chat_template.jinja").unlink()
        for name, record in WRONG_RECORDS:
            path = write(tmp_path / "a.jsonl", {"prompt": "", "completion": "a"}, record)
            with pytest.raises(UserError) as caught:
                load_records(path, tokenizer_at(tmp_path / name))
            line = str(caught.value)
            assert line.startswith(f"{path}, line 2: ")
            assert "\n" not in line
            yield f"{name}: {json.dumps(record)}", line.replace(str(tmp_path), "FOLDER")

    check("record_lines", cases())


# The block `data`, and what the run needs.
WRONG_DATASETS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # prefixes
    ({"data_path": "nowhere"}, {}),
    ({"data_path": "corpus_text_document.bin"}, {}),
    ({"data_path": ["corpus_text_document", "0.3"]}, {}),
    ({"data_path": "0.3 corpus_text_document"}, {}),
    ({"text": "corpus_text_document"}, {}),
    # sizes and tokens
    ({"data_path": "corpus_text_document", "split": "1,1"}, {"global_batch": 48}),
    ({"data_path": "corpus_text_document", "split": "999,1"}, {}),
    ({"data_path": "corpus_text_document", "split": "8,1"}, {"vocab_size": 3}),
    ({"data_path": ["1", "corpus_text_document", "1", "./corpus_text_document"], "split": "8,1"}, {}),
]


def test_each_dataset_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/golden/dataset_lines.txt has the line of each."""
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "corpus_text_document", [[1, 2, 3]] * 9)

    def cases() -> Iterator[tuple[str, str]]:
        for given, needed in WRONG_DATASETS:
            needs = replace(Needs(257, 4), **needed)
            with pytest.raises(UserError) as caught:
                open_data(RunConfig(**SMALLEST | {"data": given}).data.source, ByteTokenizer(), needs)
            line = str(caught.value).replace(str(tmp_path), "FOLDER")
            assert "\n" not in line
            yield json.dumps(given | needed), line

    check("dataset_lines", cases())


@pytest.mark.skipif(not Path("/usr/bin/zstd").exists(), reason="needs zstd")
def test_a_long_window_of_zstd_says_what_to_do(tmp_path: Path) -> None:
    packed = subprocess.run(["zstd", "-q", "--long=28", "-c"], check=True, capture_output=True, input=b"text")
    (tmp_path / "a.txt.zst").write_bytes(packed.stdout)
    line = refusal_of(
        "data", "preprocess", "--input", tmp_path / "a.txt.zst", "--output-prefix", tmp_path / "out"
    )
    assert "a.txt.zst: cannot be decompressed" in line
    assert "`zstd -d --long=31 a.txt.zst` unpacks what was written with --long" in line


def test_a_folder_counts_what_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / ".hidden").write_text("hidden")
    files = {"a.txt": b"text", "b.txt.xz": b"x", "c.JSON.gz": gzip.compress(b"[]"), "d": b"\xff"}
    files |= {
        "e.csv": b"a,b",
        "f.bin": LFS_POINTER,
        "g.txt": b'{"text": "a"}\n',
        "below/h": b"{as} prose,\n{}\n",
    }
    for name, content in files.items():
        (tmp_path / "in" / name).write_bytes(content)
    said = output_of("data", "preprocess", "--input", tmp_path / "in", "--output-prefix", tmp_path / "out")
    assert said.splitlines()[0] == (
        "2 documents, 19 tokens; left out: 1 file of .xz, which `xz -d` unpacks (b.txt.xz), 1 file "
        "of JSON whose first line is no object with text, `data preprocess --json-keys` takes another; chats go "
        "to data.sft_data_path, --data sft_data_path=FILE (c.JSON.gz), 1 file not in UTF-8 (d), 1 file of CSV or "
        "TSV, write the rows as JSON lines or Parquet (e.csv), 1 pointer of Git LFS, `git lfs pull` fetches the "
        "files (f.bin), 1 file of JSON lines, to be named *.jsonl (g.txt)"
    )
    assert json.loads((tmp_path / "out_text_document.facts.json").read_text())["documents"] == 2


def test_a_clone_without_its_rows_is_refused(tmp_path: Path) -> None:
    """As `git clone` makes it where Git LFS is not set up: its README is no dataset. Some rows are enough."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "README.md").write_text("what is in here")
    (tmp_path / "in" / "train-0.parquet").write_bytes(LFS_POINTER)
    command = ("data", "preprocess", "--input", tmp_path / "in", "--output-prefix", tmp_path / "out")
    assert refusal_of(*command) == (
        f"{tmp_path}/in/train-0.parquet: a pointer of Git LFS, and there is no other file of rows; `git lfs pull` "
        "fetches it"
    )
    (tmp_path / "in" / "train-1.jsonl").write_text('{"text": "a"}\n')
    assert "1 pointer of Git LFS" in output_of(*command)


def peak_bytes(code: str, *arguments: Any) -> int:
    """The peak memory of Python code in a process of its own; `ru_maxrss` would have that of this process, too."""
    script = f"import sys\n{code}\nprint(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return 1024 * int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


READ = """from megatron_noloco.data.corpus import Corpus
from megatron_noloco.data.encode import Counts
from megatron_noloco.data.inputs import find_inputs
from megatron_noloco.data.sources import RecordSource, TextSource
from megatron_noloco.data.tokenizer import ByteTokenizer
source = (RecordSource if "chats" in sys.argv[1] else TextSource)(sys.argv[1])
corpus = Corpus(source, ByteTokenizer(), find_inputs(sys.argv[1:], "--input"))
for _ in corpus._sequences(Counts(lambda _: None)): pass
"""


@pytest.mark.parametrize(
    "name", ["one.txt", "one.jsonl", "one.parquet", "one.arrow", "many.parquet", "many_chats.jsonl"]
)
def test_memory_is_that_of_the_largest_document(name: str, tmp_path: Path) -> None:
    """At most 8 bytes for each of its bytes, and a constant; a text is read in pieces, whatever its lines are."""
    size, many = 40_000_000, name.startswith("many")
    rows = ["some text " * 10_000] * 1000 if many else ["some text " * (size // 10)]
    (tmp_path / "tiny.txt").write_text("a")
    path, table = tmp_path / name, pyarrow.table({"text": rows})
    if path.suffix == ".txt":
        path.write_text(rows[0])
    elif path.suffix == ".jsonl":
        path.write_text(
            "".join(json.dumps({"text": row, "prompt": row, "completion": "a"}) + "\n" for row in rows)
        )
    elif path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=100)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    more = peak_bytes(READ, path) - peak_bytes(READ, tmp_path / "tiny.txt")
    document = 0 if many or path.suffix == ".txt" else size
    assert more < 8 * document + 250_000_000
