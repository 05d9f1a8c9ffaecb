"""A process goes on without its console, and says so once."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import TextIO

import pytest

from megatron_noloco.job.lasting_output import lasting_output

LINE = "stdout cannot be written ({}); training continues without its console\n"


@contextmanager
def without_reader() -> Iterator[TextIO]:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


@contextmanager
def on_a_full_disk() -> Iterator[TextIO]:
    with open("/dev/full", "w") as stream:
        yield stream


def write_much() -> None:
    """More than a buffer holds."""
    for _ in range(3):
        sys.stdout.write("one line\n")
        sys.stdout.flush()
        sys.stdout.write("x" * 100_000)
        sys.stderr.write("reason\n")


@pytest.mark.parametrize(
    ("stream", "reason"), [(without_reader, "Broken pipe"), (on_a_full_disk, "No space left on device")]
)
def test_stdout_is_dropped_with_one_line(stream: type[TextIO], reason: str) -> None:
    with stream() as stdout, redirect_stdout(stdout), redirect_stderr(StringIO()) as said:
        with lasting_output():
            write_much()
        sys.stdout.flush()
    assert said.getvalue() == LINE.format(reason) + "reason\n" * 3


def test_what_is_buffered_at_the_end_raises_nothing() -> None:
    with on_a_full_disk() as stdout, redirect_stdout(stdout), redirect_stderr(StringIO()) as said:
        with lasting_output():
            sys.stdout.write("one line\n")
        sys.stdout.flush()
    assert said.getvalue() == LINE.format("No space left on device")


def test_only_rank_0_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with (
        on_a_full_disk() as stdout,
        redirect_stdout(stdout),
        redirect_stderr(StringIO()) as said,
        lasting_output(),
    ):
        write_much()
    assert said.getvalue() == "reason\n" * 3


def test_stderr_is_dropped_silently() -> None:
    with on_a_full_disk() as stdout, without_reader() as stderr:
        with redirect_stdout(stdout), redirect_stderr(stderr), lasting_output():
            write_much()
        stderr.flush()
