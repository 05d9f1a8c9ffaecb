"""What a wrong command line is told: tests/golden/command_lines.txt has the line of each."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.federation.keys import Keys
from tests.kit.configs import FEDERATION, MISSING, edited
from tests.kit.golden import check
from tests.kit.ranks import refusal_of

ONE_RANK = {"parallel.replicas": 1, "parallel.pipeline_model_parallel_size": 1, "noloco.routing": "off"}
ALONE = ONE_RANK | {"training.train_iters": 1000}

# Commands in a folder with a.txt, the key "key" and a.json, which is a good config with edits.
WRONG: list[str | tuple[str, dict[str, Any]]] = [
    # what argparse reads
    "",
    "config --chek a",
    "generate a --prompt \udcff",
    "invite a.json --at 127.0.0.1",
    "invite a.json --at tcp://127.0.0.1:1",
    "invite a.json --valid soon",
    "invite a.json --serve",
    # numbers and quantities
    *(f"plan a.json --gpus {text}" for text in ("0", "-2", "1.5", "two")),
    *(f"config --check a.json --world-size {text}" for text in ("0", "-2")),
    *(f"plan a.json --bandwidth {text}" for text in ("0Mbit", "1GB", "1")),
    *(f"plan a.json --step {text}" for text in ("0s", "0.0ms")),
    "plan a.json --gpu-memory big",
    *(f"export a --output b --max-shard-size {text}" for text in ("''", "1TB", "big")),
    "export a --output b --dtype bf32",
    *(f"generate a --prompt b --temperature {text}" for text in ("-1", "nan", "x")),
    *(f"generate a --prompt b --seed {text}" for text in ("-1", "9" * 20, "x")),
    # options that need another one, or have no effect
    "config",
    "config --world-size 8",
    "config --dry-run",
    "plan a.json --latency 25ms",
    "plan a.json --gpu Voodoo",
    "doctor --hostfile a.txt --no-exchange",
    "doctor --latency 25ms",
    "data preprocess --input a.txt --output-prefix x --tokenizer-model y --tokenizer-type byte",
    # files and folders
    "data preprocess --input a.txt --output-prefix /proc/x",
    "data preprocess --input a.txt --output-prefix=",
    "data cache --clear ''",
    "doctor --hostfile nowhere",
    "doctor --no-exchange --rendezvous tcp://a:1",
    "import x --config a.json --output a.txt",
    "join nowhere.noloco",
    "join .",
    "join a.txt",
    # names
    "config --explain nolco",
    "config --explain noloco.local_stpes",
    "config --explain zzz",
    # configs that a command cannot take
    "invite a.json",
    ("invite a.json", FEDERATION | {"federation.key_file": MISSING}),
    ("invite a.json", FEDERATION | {"federation.rendezvous": "memory://run"}),
    "tune a.json --",
    ("tune a.json -- no-such-launcher", ALONE),
    ("tune a.json --", ALONE | {"evaluation.iters": 0}),
    ("tune a.json --", ALONE | {"training.train_iters": 100}),
    ("tune a.json --", ALONE | {"noloco.local_steps": "auto"}),
    ("tune a.json --", ALONE | {"noloco.local_steps": 300}),
    ("tune a.json --", ALONE | {"checkpoint.load": "runs/x/step_5"}),
]


def test_each_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit code 2, and nothing is written, but for short runs of `tune`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    Keys.make(tmp_path / "key")

    def cases() -> Iterator[tuple[str, str]]:
        for row in WRONG:
            command, edits = (row, {}) if isinstance(row, str) else row
            (tmp_path / "a.json").write_text(json.dumps(edited({"data.text": "a.txt", **edits})))
            changes = [f"{name} {'MISSING' if value is MISSING else value}" for name, value in edits.items()]
            said = refusal_of(*shlex.split(command)).replace(str(tmp_path), "FOLDER")
            assert {path.name for path in tmp_path.iterdir()} - {"runs"} == {"a.txt", "a.json", "key"}, (
                command
            )
            shown = ", ".join([command or "no command", *changes])
            yield shown.encode("ascii", "backslashreplace").decode(), said

    check("command_lines", cases())
