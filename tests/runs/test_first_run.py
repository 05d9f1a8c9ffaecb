"""The commands of docs/first-run.md lead from a Hugging Face folder to three machines with one model."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_noloco.preflight.invitation import invitation_in
from tests.kit.federation import assert_same, state_of
from tests.kit.ranks import REPOSITORY, network_lab
from tests.kit.tokenizers import write_tokenizer
from tests.netlab.lab import Lab
from tests.netlab.network import Link

PAGE = (REPOSITORY / "docs" / "first-run.md").read_text()
NAMES = ("first", "second", "third")
SECONDS = 600.0
TOGETHER = {"federation": {"start_with": 3}, "training": {"train_iters": 60}}  # soon at the end


def blocks() -> dict[str, list[tuple[list[str], list[str]]]]:
    """Return the commands of each section of the page, with the lines that they are said to print."""
    found = {}
    for section in PAGE.split("\n## ")[1:]:
        pairs = re.findall(
            r"((?:^    [^\n]*\n)+)(?:\n```\n([^`]*(?:`[^`]+`[^`]*)*)```)?", section, re.MULTILINE
        )
        found[section.splitlines()[0]] = [
            ([line.strip() for line in commands.splitlines()], printed.splitlines())
            for commands, printed in pairs
        ]
    return found


def pattern(line: str) -> str:
    """Return what a printed line has in common with that of another run: all but numbers, and but for "..."."""
    number = r"\d[\d.,]*(?:e[+-]\d+)?"
    parts = [re.split(number, part) for part in re.sub(" +", " ", line).split("...")]
    return ".*".join(number.join(map(re.escape, texts)) for texts in parts)


class Machine:
    """A host of the lab with a folder of its own: no other host sees it."""

    def __init__(self, there: Lab, name: str, folder: Path, model: Path) -> None:
        self._there = there
        self.name = name
        self.folder = folder
        shutil.copytree(model, folder / "my-model")

    def command(self, line: str) -> list[str]:
        bin_folder = Path(sys.executable).parent
        environ = {
            "PATH": f"{self.folder.parent / 'bin'}:{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        pairs = [f"{name}={value}" for name, value in environ.items()]
        return self._there.on(self.name, "env", "-C", str(self.folder), *pairs, "sh", "-c", f"exec {line}")

    def run(self, line: str, is_early: str = "\0") -> str:
        """Return what a command of the page prints; repeat it while it says that it came too early."""
        deadline = time.monotonic() + SECONDS
        while True:
            finished = subprocess.run(self.command(line), capture_output=True, text=True, timeout=SECONDS)
            text = finished.stderr + finished.stdout
            if is_early not in text or time.monotonic() > deadline:
                assert finished.returncode == 0, text
                return text

    @contextmanager
    def runs(self, line: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command for the context, with its output in a file."""
        with self.log.open("wb") as log:
            process = subprocess.Popen(self.command(line), stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def cut(self) -> None:
        """Lose all packets from now on."""
        self._there.cut(self.name)

    def until_log(self, pattern: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not re.search(pattern, text := self.log.read_text()):
            assert time.monotonic() < deadline, text
            time.sleep(0.2)

    @property
    def log(self) -> Path:
        return self.folder / "log"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Three hosts with the model, and a text in another format each."""
    model = tmp_path / "model"
    write_tokenizer(model)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    (program := tmp_path / "bin" / "megatron-noloco").parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megatron_noloco "$@"\n')
    program.chmod(0o755)
    with ExitStack() as stack:
        links = [Link(rate=100e6, delay=0.005)] * len(NAMES)
        there = stack.enter_context(network_lab(links, NAMES))
        for name in NAMES:
            (tmp_path / name).mkdir()
        found = [Machine(there, name, tmp_path / name, model) for name in NAMES]
        write_texts([machine.folder / "my-texts" for machine in found])
        for name in NAMES:
            for other in {*NAMES} - {name}:
                hide = there.on(name, "mount", "-t", "tmpfs", "none", str(tmp_path / other))
                subprocess.run(hide, check=True)
        yield found


def write_texts(folders: list[Path]) -> None:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    texts = [source.read_text(errors="replace") for source in sources]
    for folder in folders:
        folder.mkdir()
    for source, text in zip(sources[:20], texts[:20], strict=True):
        (folders[0] / f"{source.stem}.txt").write_text(text)
    rows = [json.dumps({"text": text}) for text in texts[20:40]]
    (folders[1] / "rows.jsonl").write_text("\n".join(rows))
    table = pyarrow.table({"text": texts[40:]})
    pyarrow.parquet.write_table(table, folders[2] / "rows.parquet")


def change(path: Path, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Make a run short, as a reader of the page may change the file."""
    config = json.loads(path.read_text())
    del config["scheduler"]
    short = {"noloco": {"local_steps": 10}, "training": {"log_interval": 5}, "evaluation": {"iters": 2}}
    for block, fields in [*short.items(), *changes.items()]:
        config[block] = config.get(block, {}) | fields
    path.write_text(json.dumps(config))


def exit_code(job: subprocess.Popen[bytes]) -> int | None:
    """Wait for the end of a job; return None if it does not end, so that the logs of all jobs can say why."""
    try:
        return job.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return None


def assert_printed(lines: list[str], text: str) -> None:
    for line in lines:
        assert re.search(f"^{pattern(line)}", re.sub(" +", " ", text), re.MULTILINE), f"{line}\n{text}"


def follow(
    machines: list[Machine], make: str, changes: Mapping[str, Mapping[str, Any]], alone: str = ""
) -> list[str]:
    """Give the commands up to the end of all jobs, with `make` as the first. Return what they print.

    Args:
        alone: what the first job logs before others are invited, a regular expression.
    """
    first, *others = machines
    printed, secrets = [first.run(make)], list[str]()
    change(first.folder / "my-run.json", changes)
    _, start, invite, join, _ = (commands[0] for commands, _ in FIVE)
    with ExitStack() as stack:
        jobs = [stack.enter_context(first.runs(start))]
        first.until_log(alone)
        for slot, machine in enumerate(others, 1):
            printed.append(first.run(invite, is_early="no job answers"))
            name = f"invitation-{slot}.noloco"
            shutil.copy(first.folder / name, machine.folder)
            secrets.append(invitation_in((machine.folder / name).read_text()).member_file.splitlines()[1])
            line = join.replace("invitation-1.noloco", name)
            assert line in printed[-1].splitlines(), "invite prints the command of the page"
            jobs.append(stack.enter_context(machine.runs(line)))
        codes = [exit_code(job) for job in jobs]
        assert codes == [0] * len(machines), "\n".join(
            machine.log.read_text()[-3000:] for machine in machines
        )
    logs = [machine.log.read_text() for machine in machines]
    assert not any(secret in log for secret in secrets for log in [*logs, *printed])
    assert f"final average of replicas {', '.join(map(str, range(len(machines))))}" in logs[0]
    return [printed[0], logs[0], printed[1], logs[1]]


def export(machines: list[Machine]) -> str:
    """Give the last command on each machine, which then have one model. Return what the first prints."""
    line = FIVE[-1][0][0]
    first, *_ = [
        machine.run(line if number == 0 else line.replace("runs/my-run", "joined/run"))
        for number, machine in enumerate(machines)
    ]
    weights = {(machine.folder / "trained-model" / "model.safetensors").read_bytes() for machine in machines}
    assert len(weights) == 1, "one model, bit for bit"
    return first


FIVE = blocks()["Five commands"]


@pytest.mark.slow
def test_five_commands_and_what_they_print(machines: list[Machine]) -> None:
    printed = follow(machines, FIVE[0][0][0], {"training": {"train_iters": 1000}}, alone=r"iteration +200/")
    printed.append(export(machines))
    assert FIVE[2][0][1] == "scp invitation-1.noloco second:"
    for (_, lines), text in zip(FIVE, printed, strict=True):
        assert lines
        assert_printed(lines, text)


def test_a_folder_in_the_place_of_the_network(machines: list[Machine], tmp_path: Path) -> None:
    """The first machines' checkpoints have one model, bit for bit."""
    (((make,), _),) = blocks()["With a shared folder"]
    (shared := tmp_path / "shared").mkdir()
    for machine in machines:
        machine.cut()
    two = {"federation": {"start_with": 2}, "training": {"train_iters": 20}}
    follow(machines[:2], make.replace("/shared", str(shared)), two)
    first, second = (
        state_of(machine.folder / output / f"replica_{slot:02d}" / "checkpoints", slot, 20)
        for slot, (machine, output) in enumerate(zip(machines, ("runs/my-run", "joined/run"), strict=False))
    )
    slow = {name: tensor for name, tensor in first.items() if "slow" in name}
    assert slow
    assert_same({name: tensor for name, tensor in second.items() if "slow" in name}, slow)


@pytest.mark.slow
def test_a_machine_of_several_ranks_trains_with_the_others(machines: list[Machine]) -> None:
    """The block `parallel` stands for two GPUs. All ranks choose the overlap after the same round."""
    (layout,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    overlap = {"noloco": {"local_steps": 10, "overlap_steps": "auto"}}
    logs = follow(machines, FIVE[0][0][0], TOGETHER | overlap | json.loads("{" + layout + "}"))
    export(machines)
    assert "= 2 ranks" in logs[1]
    assert "= 1 rank\n" in logs[3]
