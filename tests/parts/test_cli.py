"""The one command line: quick to import, and one place where errors become lines and exit codes."""

import os
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from megatron_noloco.cli import config, options
from megatron_noloco.cli.exit_codes import StoppedError
from megatron_noloco.cli.main import main
from megatron_noloco.errors import UserError
from megatron_noloco.federation.keys import Keys
from megatron_noloco.training import start
from tests.kit.ranks import REPOSITORY, call_here, output_of, refusal_of
from tests.kit.tiny import tiny, write_config


def command_that_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    monkeypatch.setattr(config, "_config", Mock(side_effect=error))
    return call_here("config", "--explain")


def test_a_ctrl_c_leaves_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command_that_raises(KeyboardInterrupt(), monkeypatch) == (130, "", "")


def test_a_ctrl_c_during_the_imports_leaves_without_a_message(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    finished = subprocess.run(
        [sys.executable, "-m", "megatron_noloco", "--version"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
    )
    assert (finished.returncode, finished.stderr) == (-signal.SIGINT, b"")


def test_a_full_disk_below_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "megatron_noloco", "config", "--explain"]
        finished = subprocess.run(words, cwd=REPOSITORY, stdout=full, stderr=subprocess.PIPE)
    assert (finished.returncode, finished.stderr) == (2, b"[Errno 28] No space left on device\n")


@pytest.mark.parametrize("command", ["config --explain", "doctor --no-exchange --json"])
def test_a_reader_that_has_gone_ends_a_command_without_a_message(command: str) -> None:
    """As `| head -1`."""
    words = [sys.executable, "-m", "megatron_noloco", *command.split()]
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (UserError("heads: 3 is odd"), 2, "heads: 3 is odd"),
        (PermissionError(13, "Permission denied", "a.bin"), 2, "[Errno 13] Permission denied: 'a.bin'"),
        (StoppedError("replica 3 did not answer"), 1, "replica 3 did not answer"),
        (
            PackageNotFoundError("megatron-core"),  # as of `doctor` beside DeepSpeed alone
            2,
            "megatron-noloco: this command needs packages that are not installed (); pip install "
            "'megatron-noloco[trainer]'",
        ),
    ],
)
def test_a_known_error_is_one_line_with_its_exit_code(
    error: Exception, exit_code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command_that_raises(error, monkeypatch) == (exit_code, "", f"{line}\n")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        ModuleNotFoundError("no", name="mine"),
        ValueError("operands of shapes (2,) and (3,)"),
        FileNotFoundError(2, "No such file", "a file that this program did not write"),
    ],
)
def test_an_unknown_error_is_a_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = command_that_raises(error, monkeypatch)
    assert (code, err.split()[0]) == (1, "Traceback")


@pytest.mark.parametrize(
    ("option", "texts", "problem"),
    [
        ("plan a.json --gpus", ("0", "-2", "1.5", "two"), "is not a whole number of at least 1"),
        ("config --check a.json --world-size", ("0", "-2"), "is not a whole number of at least 1"),
        ("plan a.json --bandwidth", ("0Mbit",), "must be more than 0, such as 100Mbit or 1Gbit"),
        ("plan a.json --bandwidth", ("1GB", "1"), "is not a bandwidth; write 100Mbit or 1Gbit"),
        ("plan a.json --step", ("0s", "0.0ms"), "must be more than 0, such as 25ms, 0.3s or 1h"),
        ("export a --output b --max-shard-size", ("", "1TB", "big"), "is not a size; write 500MB or 2GB"),
        ("export a --output b --dtype", ("bf32",), "is not one of fp32, bf16, fp16"),
        ("generate a --prompt b --temperature", ("-1", "nan", "x"), "is not a number of at least 0"),
        ("generate a --prompt b --seed", ("-1", "9" * 20, "x"), "is not a whole number from 0 to 2^63 - 1"),
    ],
)
def test_a_number_out_of_bounds(option: str, texts: tuple[str, ...], problem: str) -> None:
    for text in texts:
        assert refusal_of(*option.split(), text).endswith(f': "{text}" {problem}')


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        ([], "error: the following arguments are required: COMMAND"),
        (["config", "--chek", "a"], "error: unrecognized arguments: --chek a"),
        (["generate", "a", "--prompt", "\udcff"], "error: argument --prompt: '\\udcff' is not UTF-8 text"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line(arguments: list[str], end: str) -> None:
    assert refusal_of(*arguments).endswith(end)


@pytest.mark.parametrize(
    "command", ["train", "plan", "data preprocess", "keys", "inspect", "generate", "stop"]
)
def test_help_has_a_sentence_and_an_example(command: str) -> None:
    out = output_of(*command.split(), "--help")
    assert f"\nexample:\n  megatron-noloco {command} " in out
    assert out.split("\n\n")[1][0].isupper()


def test_quantities_with_units() -> None:
    for text, size in (("5", 5), ("10KB", 10_000), ("2 gb", 2 * 10**9), ("1.5MB", 1_500_000)):
        assert options.size(text) == size
    assert options.bandwidth("8Mbit") == 1e6
    assert options.dtype("bf16") == options.dtype("bfloat16") == "bfloat16"
    assert (options.duration("25ms"), options.latency("0ms")) == (0.025, 0)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("config", "megatron_noloco config: give --explain, --schema or --check FILE"),
        (
            "data preprocess --input {file} --output-prefix {folder}/x --tokenizer-model y --tokenizer-type byte",
            'tokenizer_model does not go together with tokenizer_type "byte"; leave one out',
        ),
        (
            "data preprocess --input {file} --output-prefix /proc/x",
            "/proc: cannot be written: No such file or directory; give another --output-prefix",
        ),
        (
            "data preprocess --input {file} --output-prefix=",
            "--output-prefix ., --json-keys text: make no name of a file, as data/corpus and text do",
        ),
        ("import x --config {file} --output {file}", "{file}: exists; give another --output, or remove it"),
        # Options without effect
        (
            "doctor --hostfile {file} --no-exchange",
            "--hostfile: names hosts that send each other messages, which --no-exchange leaves out",
        ),
    ],
)
def test_an_option_that_is_refused_is_named(arguments: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text")
    places = {"folder": tmp_path, "file": file}
    assert refusal_of(*arguments.format(**places).split()) == line.format(**places)
    assert file.read_text() == "text"


CHECK = (
    "from megatron_noloco.config import load_config, explain; explain(); load_config('configs/routing.json')"
)


@pytest.mark.parametrize(
    ("code", "slow"),
    [
        ("import megatron_noloco.cli.main", "torch pydantic rich deepspeed megatron transformers numpy"),
        (CHECK, "torch deepspeed megatron mpi4py"),
        (
            "import megatron_noloco.data.corpus, megatron_noloco.data.opening",
            "torch megatron transformers",
        ),
    ],
)
def test_what_needs_no_engine_imports_none(code: str, slow: str) -> None:
    """Importing torch or megatron.core takes seconds, on every rank and in every process that encodes."""
    program = f"import sys; {code}; sys.exit(' '.join({set(slow.split())} & sys.modules.keys()) or 0)"
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, cwd=REPOSITORY, timeout=60, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_a_command_without_its_packages_says_what_to_install() -> None:
    arguments = ["train", "--config", "configs/quickstart.json"]
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(['deepspeed', 'megatron', 'rich', 'safetensors'])\n"  # None: not installed
        f"from megatron_noloco.cli.main import run; run({arguments!r})"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, timeout=60, capture_output=True, text=True
    )
    assert finished.returncode == 2
    missing = "(deepspeed, megatron, rich, safetensors); pip install 'megatron-noloco[trainer]'"
    assert (
        finished.stderr == f"megatron-noloco: this command needs packages that are not installed {missing}\n"
    )


@pytest.mark.parametrize(
    ("dp", "gpus", "environ", "starts"),
    [
        (2, 0, {}, True),
        (2, 2, {}, True),
        (1, 0, {}, False),
        (2, 1, {}, False),  # a replica over several hosts
        (2, 0, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}, False),
    ],
)
def test_train_starts_the_ranks_of_a_replica_by_itself(
    dp: int, gpus: int, environ: dict[str, str], starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Keys.make(tmp_path / "key")
    federation = {"rendezvous": "tcp://127.0.0.1:29600", "key_file": str(tmp_path / "key")}
    parallel = {"data_parallel_size": dp}
    file = write_config(tmp_path, tiny({"federation": federation, "parallel": parallel}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "execv", started := Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(start, "start", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    main(["train", str(file), "--replica", "3"])
    assert started.called == starts
    if starts:
        words = " ".join(started.call_args.args[1][1:])
        launcher = "-m megatron_noloco.job.torchrun --standalone --nproc-per-node 2 -m megatron_noloco"
        assert words == f"{launcher} train {file} --progress auto --replica 3"
