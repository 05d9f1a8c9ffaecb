"""What `doctor` reports about a machine, and about one that lacks something."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.cli.main import main
from megatron_noloco.preflight import machine, mpi_check
from megatron_noloco.preflight.machine import Finding


def lines(findings: Iterable[Finding], state: str = "problem") -> list[str]:
    return [finding.what for finding in findings if finding.state == state]


def test_buffers_of_the_kernel_are_compared_with_the_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """200 Mbit/s and 100 ms: 5 MB are under way in a round trip."""
    buffers = {name: tmp_path / name for name in ("wmem", "rmem")}
    monkeypatch.setattr(machine, "_BUFFERS", buffers)
    for limits, expected in (((4e6, 6e6), "2"), ((1e6, 6e6), "5"), ((16e6, 9e6), "2"), ((16e6, 10e6), "")):
        for path, limit in zip(buffers.values(), limits, strict=True):
            path.write_text(f"4096\t16384\t{limit:.0f}\n")
        (finding,) = machine.check_buffers(200e6 / 8, 0.1)
        assert finding.state == ("note" if expected else "ok")
        assert finding.advice.startswith(
            f"set federation.streams to {expected} on both sides" * bool(expected)
        )


def test_an_mpirun_that_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'no such host' >&2\nexit 3\n")
    mpirun.chmod(0o755)
    monkeypatch.setenv("MPIRUN", str(mpirun))
    assert lines(mpi_check.check_mpi(None, 1.0)) == [f"2 ranks under {mpirun} did not exchange: no such host"]
    framed = "----\nPRTE detected a parse error in the hostfile:\n   hosts\n\non line 1.\n----"
    assert mpi_check._first_words(framed) == "PRTE detected a parse error in the hostfile: hosts on line 1"
    mpirun.write_text('#!/bin/sh\nif [ $1 = -n ]; then shift 2; exec "$@"; fi\n')
    (line,) = lines(mpi_check.check_mpi(None, 1.0))
    assert "did not exchange: each of the ranks is alone: mpi4py runs on " in line


def test_mpirun_and_profile_are_those_of_the_launch_scripts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mpirun = tmp_path / "my mpirun"
    version = 'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.8"; exit; fi'
    mpirun.write_text(f'#!/bin/sh\n{version}\necho "$OMPI_MCA_pml $*" | cut -c 1-20 >&2\nexit 3\n')
    mpirun.chmod(0o755)
    monkeypatch.setenv("MPIRUN", str(mpirun))
    for profile, said in (
        ("wan", "ob1 -n 2 --bind-to n"),
        ("ib", "ucx -x UCX_TLS -n 2"),
        ("lan", "LAUNCH_PROFILE=lan is unknown: it must be wan, ethernet or ib"),
    ):
        monkeypatch.setenv("LAUNCH_PROFILE", profile)
        (line,) = lines(mpi_check.check_mpi(None, 1.0))
        assert line.startswith(f"2 ranks under {mpirun} did not exchange: {said}")


def test_mpirun_is_a_path_or_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name is found on PATH; what is not there is not replaced by another."""
    (tmp_path / "mpirun.other").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for given in ("mpirun.other", str(tmp_path / "mpirun.other")):
        monkeypatch.setenv("MPIRUN", given)
        assert mpi_check.find_mpirun() == str(tmp_path / "mpirun.other")
    for given in ("mpirun.missing", "/nowhere/mpirun"):
        monkeypatch.setenv("MPIRUN", given)
        assert lines(mpi_check.check_mpi(None, 1.0)) == [f"MPIRUN={given}: there is no such program"]


@pytest.mark.parametrize(
    ("differs", "notes"),
    [
        ({}, []),
        ({"hidden": 0.2}, ["80 % of an exchange is not hidden behind compute"]),
        ({"hidden": 0.2, "hosts": ["a", "a"]}, []),
    ],
)
def test_an_exchange_between_hosts_that_compute_does_not_hide_is_noted(
    differs: dict[str, Any], notes: list[str]
) -> None:
    measured = {"hosts": ["a", "b"], "latency_seconds": 5e-5, "gb_per_second": 1.0, "hidden": 0.9}
    found = lines(mpi_check._of_exchange(measured | differs), "note")
    assert [line[: len(note)] for line, note in zip(found, notes, strict=True)] == notes


def test_a_machine_with_a_problem_is_not_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real ranks exchange for a moment."""
    assert main(["doctor", "--json", "--seconds", "0.1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ready"]
    assert {"packages", "MPI", "exchange"} <= {finding["area"] for finding in found["findings"]}
    (measured,) = (finding["figures"] for finding in found["findings"] if finding["figures"])
    assert 0 <= measured["hidden"] <= 1
    monkeypatch.setenv("MPIRUN", "/nowhere")
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Fix first: MPI: MPIRUN=/nowhere: there is no such program")


def test_a_hostfile_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--hostfile", "/nowhere/hosts"]) == 2
    assert capsys.readouterr().err == "--hostfile /nowhere/hosts: there is no such file\n"
