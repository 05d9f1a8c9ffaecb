"""What a person gets wrong: exit code 2 and exactly one line, which says what."""

import json
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_noloco.cli.main import main
from megatron_noloco.data import indexed
from tests.kit.configs import SMALLEST
from tests.kit.datasets import write_dataset
from tests.kit.golden import check
from tests.kit.ranks import call, refusal_of, run_mpi
from tests.kit.tiny import already_joined

USAGE_ERROR = 2
LATE = "tests.kit.late_first_rank"
TEXT = "To be, or not to be, that is the question. " * 100
GOOD: dict[str, Any] = SMALLEST | {
    "parallel": {"replicas": 2},
    "data": {"text": "text.txt", "split": "8,2,0"},
    "evaluation": {"iters": 1},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def config_with(folder: Path, changes: Mapping[str, Any]) -> str:
    """Write a config file that is good but for `changes`, block by block."""
    content = dict(GOOD)
    for key, value in changes.items():
        old = content.get(key)
        content[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    if content["data"]["text"] == "text.txt":
        content["data"] = {**content["data"], "text": str(folder / "text.txt")}
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


def assert_one_line(exit_code: int, stderr: str, fragments: tuple[str, ...]) -> None:
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert exit_code == USAGE_ERROR, stderr
    assert len(lines) == 1, stderr
    for fragment in fragments:
        assert fragment in lines[0]


# One for each check of a start; the rules themselves are tested where they are.
MISTAKES: dict[str, dict[str, Any]] = {
    "misspelt key": {"noloco": {"local_step": 10}},
    "Transformer Engine without a GPU": {"model": {"transformer_impl": "transformer_engine"}},
    "a folder that cannot be made": {"training": {"output_dir": "/dev/null/run"}},
    "missing data": {"data": {"text": "/no/such/text"}},
    "missing records": {"data": {"text": None, "sft_data_path": "/no/such/records"}},
    "a vocabulary that is too small": {"model": {"vocab_size": 200}},
    "a checkpoint that is not there": {"checkpoint": {"load": "/no/such/step"}},
}


def test_a_start_and_a_check_find_it_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0 of 2, in this process: none of these mistakes may get as far as joining the others."""
    monkeypatch.chdir(folder)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)

    def cases() -> Iterator[tuple[str, str]]:
        for mistake, changes in MISTAKES.items():
            config = config_with(folder, changes)
            for command in ("train", "config --check"):
                said = refusal_of(*command.split(), config)
                yield f"{command}, {mistake}", said.replace(str(folder), "FOLDER")

    check("start_lines", cases())


def test_a_place_of_checkpoints_must_be_writable_at_the_start(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "checkpoints").touch()
    code = main(["config", "--check", config_with(folder, {"training": {"output_dir": str(folder / "run")}})])
    assert_one_line(code, capfd.readouterr().err, ("checkpoints: cannot be written: Not a directory; give",))


def test_the_other_ranks_let_rank_0_report_first(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they left at once, the launcher would end the job, and rank 0 with it, before it has reported."""
    naps: list[float] = []
    written_before: list[str] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        written_before.append(capfd.readouterr().err)

    monkeypatch.setattr(time, "sleep", nap)
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    exit_code = main(["train", "--config", config_with(folder, MISTAKES["missing data"])])
    here = f"rank 1 on {socket.gethostname()}: "
    assert_one_line(exit_code, capfd.readouterr().err, (here, "no file or folder at /no/such/text"))
    assert set(written_before) == {""}
    assert sum(naps) >= 5


def test_a_corpus_that_is_too_small_is_one_line(folder: Path) -> None:
    """Its size is known once its dataset is made, when the ranks have joined."""
    changes = {"evaluation": {"iters": 1000}, "parallel": {"replicas": 1}}
    exit_code, _, stderr = call("train", config_with(folder, changes), meanwhile=already_joined)
    assert_one_line(exit_code, stderr, ("corpus too small", "need 2000 samples"))


def test_a_check_leaves_nothing_behind(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output_dir = folder / "runs" / "new"
    assert (
        main(["config", "--check", config_with(folder, {"training": {"output_dir": str(output_dir)}})]) == 0
    )
    assert "parameters: " in capfd.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "text.txt"]


def test_a_token_that_only_the_run_reads_ends_it_with_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large dataset the start checks an excerpt, here pairs of tokens far apart."""
    monkeypatch.setattr(indexed, "_EXCERPT_TOKENS", 32)
    documents = (np.full(50, -1 if number == 20 else number) for number in range(40))
    prefix = write_dataset(folder / "large", documents, vocab_size=1 << 20)
    data = {"text": None, "data_path": prefix, "split": "1,0,0"}
    changes = {"data": data, "parallel": {"replicas": 1}, "evaluation": {"iters": 0}}
    config = config_with(
        folder, {**changes, "training": {"train_iters": 100, "output_dir": str(folder / "run")}}
    )
    exit_code, _, stderr = call("train", config, meanwhile=already_joined)
    assert exit_code == USAGE_ERROR, stderr
    assert stderr.splitlines()[-1].startswith("sample ")
    assert "holds token -1, the vocabulary has 257" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr


def test_a_command_without_a_launcher_is_answered_in_one_line(folder: Path) -> None:
    line = refusal_of("train", "--config", config_with(folder, {}))
    assert "1 rank is not 2 replicas x pipeline 1 x data 1 x tensor 1 = 2" in line
    assert "no launcher has started this" in line


def our_lines(stderr: str, fragment: str) -> list[str]:
    """Return the lines with this fragment; mpirun and torchrun add lines, torchrun a traceback of its own."""
    assert "/megatron_noloco/" not in stderr, f"a traceback through our code: {stderr}"
    return [line for line in stderr.splitlines() if fragment in line]


def test_world_size_under_mpirun(folder: Path) -> None:
    changes = {"parallel": {"replicas": "auto", "pipeline_model_parallel_size": 2}}
    finished = run_mpi(3, LATE, ["train", "--config", config_with(folder, changes)])
    assert finished.returncode == USAGE_ERROR, finished.stderr
    assert our_lines(finished.stderr, "do not divide") == [
        "3 ranks do not divide into replicas of pipeline 2 x data 1 x tensor 1 = 2 ranks; start 2 or 4 ranks"
    ]


def test_one_rank_alone_fails_under_mpirun(folder: Path) -> None:
    """Rank 0 cannot open its store while the other waits to hear where it is: one line ends the job."""
    config = config_with(folder, {"parallel": {"replicas": 2}})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        finished = run_mpi(2, "megatron_noloco", ["train", "--config", config], env=environ)
    assert finished.returncode == USAGE_ERROR, finished.stderr
    assert our_lines(finished.stderr, "is in use") == [
        f"port {port} of rank 0's host is in use, perhaps by another job: set MASTER_PORT to a free one (for "
        "launch/deepspeed.sh PORT)"
    ]
