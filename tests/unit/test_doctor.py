"""What `doctor` reports about a machine, and about one that lacks something."""

import json
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.cli.main import main
from megatron_noloco.preflight import machine, mpi_check
from megatron_noloco.preflight.machine import Finding

Usage = namedtuple("Usage", "free")
Address = namedtuple("Address", "family address")
Status = namedtuple("Status", "isup speed")


def lines(findings: Iterable[Finding], state: str = "problem") -> list[str]:
    return [finding.what for finding in findings if finding.state == state]


def test_a_driver_whose_gpu_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = set[str]()
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if name in programs else None)
    assert lines(machine.check_gpus()) == []
    programs.add("nvidia-smi")
    assert "but torch" in lines(machine.check_gpus())[0]


def test_how_large_a_group_of_ranks_stays_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensor and expert parallelism, whose collectives are inside layers."""
    cuda = machine.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 4)
    monkeypatch.setattr(cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (0, 80e9))
    monkeypatch.setattr(cuda.nccl, "version", lambda: (2, 27))
    monkeypatch.setattr(cuda, "is_bf16_supported", lambda **_: True)
    gpus, layout = lines(machine.check_gpus(), "ok")
    assert gpus.startswith("4 x H100, 80 GB")
    assert layout == "tensor_model_parallel_size x expert_model_parallel_size up to 4 stays on this host"


def test_a_container_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(64e6))
    assert lines(machine.check_shared_memory())[0].startswith("64 MB free in /dev/shm")


@pytest.mark.parametrize(
    ("addresses", "own", "notes"),
    [
        ({"eth0": "10.0.0.7"}, "10.0.0.7", []),
        ({"eth0": "10.0.0.7"}, "127.0.1.1", ["this host's name"]),
        ({"eth0": "10.0.0.7", "docker0": "172.17.0.1"}, "10.0.0.7", ["2 interfaces"]),
        ({}, "127.0.1.1", ["no interface"]),
    ],
)
def test_interfaces(
    addresses: dict[str, str], own: str, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_ = {"lo": "127.0.0.1", **addresses}
    of_each = {name: [Address(machine.socket.AF_INET, at)] for name, at in all_.items()}
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: of_each)
    monkeypatch.setattr(machine.psutil, "net_if_stats", lambda: {name: Status(True, 1000) for name in all_})
    monkeypatch.setattr(machine.socket, "gethostbyname", lambda name: own)
    found = lines(machine.check_network(), "note")
    assert [line[: len(note)] for line, note in zip(found, notes, strict=True)] == notes


def test_an_mpirun_that_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'no such host' >&2\nexit 3\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(mpi_check, "find_mpirun", lambda: str(mpirun))
    assert lines(mpi_check.check_mpi(None, 1.0)) == [f"2 ranks under {mpirun} did not exchange: no such host"]
    framed = "----\nPRTE detected a parse error in the hostfile:\n   hosts\n\non line 1.\n----"
    assert mpi_check._first_words(framed) == "PRTE detected a parse error in the hostfile: hosts on line 1"
    mpirun.write_text('#!/bin/sh\nif [ $1 = -n ]; then shift 2; exec "$@"; fi\n')
    (line,) = lines(mpi_check.check_mpi(None, 1.0))
    assert "did not exchange: each of the ranks is alone: mpi4py runs on " in line
    monkeypatch.setattr(mpi_check, "find_mpirun", lambda: None)
    assert lines(mpi_check.check_mpi(None, 1.0), "note")[0].startswith("no mpirun")


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


MEASURED: dict[str, Any] = {
    "hosts": ["a", "b"],
    "library": "Open MPI v5.0.11",
    "thread_level": "multiple",
    "latency_seconds": 5e-5,
    "gb_per_second": 1.0,
    "hidden": 0.9,
    "clock_skew_seconds": -0.1,
    "over": "tcp",
}


@pytest.mark.parametrize(
    ("differs", "note"),
    [
        ({}, None),
        ({"hidden": 0.2}, "80 % of an exchange is not hidden behind compute"),
        ({"hidden": 0.2, "hosts": ["a", "a"]}, None),
        ({"clock_skew_seconds": -3.0}, "the clocks of a and b differ by 3.0 s"),
        ({"over": "ucx"}, None),
    ],
)
def test_what_an_exchange_shows(
    differs: dict[str, Any], note: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_check, "pair", lambda *arguments: MEASURED | differs)
    notes = lines(mpi_check.check_mpi(None, 1.0), "note")
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)


def test_a_faster_network_that_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mpi_check, "pair", lambda *arguments: MEASURED)
    monkeypatch.setattr(mpi_check, "_INFINIBAND", tmp_path)
    (over_tcp,) = lines(mpi_check.check_mpi(None, 1.0), "note")
    assert "go over tcp" in over_tcp


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real ranks exchange for a moment."""
    assert main(["doctor", "--json", "--seconds", "0.1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ready"]
    assert {"packages", "MPI", "exchange"} <= {finding["area"] for finding in found["findings"]}
    (measured,) = (finding["figures"] for finding in found["findings"] if finding["figures"])
    assert 0 <= measured["hidden"] <= 1
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(64e6))
    assert main(["doctor", "--seconds", "0"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("Fix first: limits: 64 MB free ")


def test_a_hostfile_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--hostfile", "/nowhere/hosts"]) == 2
    assert capsys.readouterr().err == "--hostfile /nowhere/hosts: there is no such file\n"
