"""What the doctor says about a machine, and what about one that lacks something."""

import json
import re
import resource
import tomllib
from collections import namedtuple
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.cli.main import main
from megatron_noloco.preflight import machine, mpi, packages
from megatron_noloco.preflight.finding import Finding
from tests.harness import REPOSITORY

Usage = namedtuple("Usage", "free")
Address = namedtuple("Address", "family address")
Status = namedtuple("Status", "isup speed")


def lines(findings: Iterable[Finding], state: str = "problem") -> list[str]:
    return [finding.what for finding in findings if finding.state == state]


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = project["dependencies"] + [line for name in extras if name != "dev" for line in extras[name]]
    bounds = dict(re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in asked)  # type: ignore[union-attr]
    assert packages.NEEDED.items() <= bounds.items()
    assert {name: bound for name, (bound, _) in packages.OPTIONAL.items()}.items() <= bounds.items()
    assert project["requires-python"] == str(packages.PYTHON).replace("<3.14,>=3.11", ">=3.11,<3.14")


def test_a_package_that_is_missing_and_one_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("pyzmq", "mpi4py"):
            raise PackageNotFoundError(name)
        return {"deepspeed": "0.20.0"}.get(name, real(name))

    real = packages.version
    monkeypatch.setattr(packages, "version", version)
    found = list(packages.check_packages())
    assert lines(found) == ["pyzmq is not installed", "deepspeed 0.20.0; ==0.19.8 is needed"]
    assert lines(found, "note")[0].startswith("no mpi4py: no exchanges over MPI")


def test_the_other_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's package of that name is unrelated."""
    found = {"apex"}
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: name in found or None)
    monkeypatch.setattr(packages.shutil, "which", lambda name: None if name == "nvcc" else name)
    assert "unrelated" in lines(packages.check_kernels(gpu=True))[0]
    assert list(packages.check_kernels(gpu=False)) == []
    found.add("amp_C")
    assert lines(packages.check_kernels(gpu=True)) == []
    assert any(line.startswith("no nvcc: ") for line in lines(packages.check_kernels(gpu=True), "note"))


def test_the_commands_that_build_apex_are_those_of_the_requirements() -> None:
    told = re.sub(r"\n# +", " && ", (REPOSITORY / "requirements-gpu.txt").read_text())
    assert packages.APEX in told


def test_a_driver_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert lines(machine.check_accelerators()) == []
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "torch" in lines(machine.check_accelerators())[0]


def test_a_container_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(64e6))
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1024, 1024))
    found = list(machine.check_limits())
    assert lines(found)[0].startswith("64 MB free in /dev/shm")
    assert lines(found, "note")[0].startswith("1024 open files")


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
    inet = machine.socket.AF_INET
    monkeypatch.setattr(
        machine.psutil, "net_if_addrs", lambda: {name: [Address(inet, at)] for name, at in all_.items()}
    )
    monkeypatch.setattr(machine.psutil, "net_if_stats", lambda: {name: Status(True, 1000) for name in all_})
    monkeypatch.setattr(machine.socket, "gethostbyname", lambda name: own)
    found = lines(machine.check_network(), "note")
    assert [any(line.startswith(note) for line in found) for note in notes] == [True] * len(notes)
    assert len(found) == len(notes)


def test_an_mpirun_that_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'no such host' >&2\nexit 3\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(mpi, "find_mpirun", lambda: str(mpirun))
    assert lines(mpi.check_mpi(None, 1.0)) == [f"2 ranks under {mpirun} did not exchange: no such host"]
    framed = [
        "-" * 74,
        "PRTE detected a parse error in the hostfile:",
        "   hosts",
        "",
        "on line 1.",
        "-" * 74,
    ]
    assert (
        mpi._first_words("\n".join(framed)) == "PRTE detected a parse error in the hostfile: hosts on line 1"
    )
    mpirun.write_text('#!/bin/sh\nif [ $1 = -n ]; then shift 2; exec "$@"; fi\n')
    (said,) = lines(mpi.check_mpi(None, 1.0))
    assert "did not exchange: each of the ranks is alone: mpi4py runs on " in said
    monkeypatch.setattr(mpi, "find_mpirun", lambda: None)
    assert lines(mpi.check_mpi(None, 1.0), "note")[0].startswith("no mpirun")


MEASURED: dict[str, Any] = {
    "hosts": ["a", "b"],
    "library": "Open MPI v5.0.11",
    "thread_level": "multiple",
    "gpu_buffers": False,
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
    monkeypatch.setattr(mpi, "pair", lambda *asked: MEASURED | differs)
    notes = lines(mpi.check_mpi(None, 1.0), "note")
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)


def test_a_faster_network_that_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mpi, "pair", lambda *asked: MEASURED)
    monkeypatch.setattr(mpi, "_INFINIBAND", tmp_path)
    assert "go over tcp" in lines(mpi.check_mpi(None, 1.0), "note")[0]
    monkeypatch.setattr(mpi.torch.cuda, "is_available", lambda: True)
    assert "knows no CUDA" in lines(mpi.check_mpi(None, 1.0), "note")[1]


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real ranks exchange for a moment."""
    assert main(["doctor", "--json", "--seconds", "0.1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ready"]
    assert {"packages", "MPI", "exchange"} <= {finding["area"] for finding in found["findings"]}
    (measured,) = (finding["figures"] for finding in found["findings"] if finding["figures"])
    assert 0 <= measured["hidden"] <= 1
    monkeypatch.setitem(packages.NEEDED, "numpy", "<1")
    assert main(["doctor", "--seconds", "0"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("Fix first: packages: numpy ")


def test_a_hostfile_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--hostfile", "/nowhere/hosts"]) == 2
    assert capsys.readouterr().err == "--hostfile /nowhere/hosts: there is no such file\n"
