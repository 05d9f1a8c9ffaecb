"""What `doctor` reports about a machine, and about one that lacks something."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_noloco.preflight import machine, mpi_check
from megatron_noloco.preflight.machine import Finding
from tests.kit.ranks import call_here, output_of


def lines(findings: Iterable[Finding], state: str = "problem") -> list[str]:
    return [finding.what for finding in findings if finding.state == state]


def test_buffers_of_the_kernel_are_compared_with_the_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """200 Mbit/s and 100 ms: 5 MB are under way in a round trip."""
    buffers = {name: tmp_path / name for name in ("wmem", "rmem")}
    monkeypatch.setattr(machine, "_BUFFERS", buffers)
    monkeypatch.setattr(machine, "_CONGESTION", control := tmp_path / "control")
    control.write_text("bbr\n")
    for limits, is_enough in (((4e6, 6e6), False), ((16e6, 9e6), False), ((16e6, 10e6), True)):
        for path, limit in zip(buffers.values(), limits, strict=True):
            path.write_text(f"4096\t16384\t{limit:.0f}\n")
        (finding,) = machine.check_buffers(200e6 / 8, 0.1)
        assert finding.state == ("ok" if is_enough else "note")
        assert finding.advice.startswith("raise the last number" * (not is_enough))
    control.write_text("cubic\n")
    assert [len([*machine.check_buffers(200e6 / 8, latency)]) for latency in (0.1, 0.001)] == [2, 1]


def test_an_mpirun_that_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'no such host' >&2\nexit 3\n")
    mpirun.chmod(0o755)
    monkeypatch.setenv("MPIRUN", str(mpirun))
    assert lines(mpi_check.check_mpi(None)) == [f"2 ranks under {mpirun} did not exchange: no such host"]
    framed = "----\nPRTE detected a parse error in the hostfile:\n   hosts\n\non line 1.\n----"
    assert mpi_check._first_words(framed) == "PRTE detected a parse error in the hostfile: hosts on line 1"
    mpirun.write_text('#!/bin/sh\nif [ $1 = -n ]; then shift 2; "$@"; exec "$@"; fi\n')
    (line,) = lines(mpi_check.check_mpi(None))
    assert "did not exchange: each of the ranks is alone: mpi4py runs on another MPI" in line


def test_mpirun_is_a_path_or_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name is found on PATH; what is not there is not replaced by another."""
    (tmp_path / "mpirun.other").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for given in ("mpirun.other", str(tmp_path / "mpirun.other")):
        monkeypatch.setenv("MPIRUN", given)
        assert mpi_check.find_mpirun() == str(tmp_path / "mpirun.other")
    for given in ("mpirun.missing", "/nowhere/mpirun"):
        monkeypatch.setenv("MPIRUN", given)
        assert lines(mpi_check.check_mpi(None)) == [f"MPIRUN={given}: there is no such program"]


def test_a_machine_with_a_problem_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real ranks exchange for a moment."""
    found = json.loads(output_of("doctor", "--json"))
    assert found["ready"]
    assert {"packages", "MPI", "exchange"} <= {finding["area"] for finding in found["findings"]}
    (measured,) = (finding["figures"] for finding in found["findings"] if finding["figures"])
    assert measured["latency_seconds"] > 0
    assert measured["gb_per_second"] > 0
    monkeypatch.setenv("MPIRUN", "/nowhere")
    code, out, _ = call_here("doctor")
    assert code == 1
    assert out.splitlines()[-1].startswith("Fix first: MPI: MPIRUN=/nowhere: there is no such program")


def interfaces(
    monkeypatch: pytest.MonkeyPatch, resolved: str, is_separate: bool = False, **addresses: list[str]
) -> list[Finding]:
    """What is found on a host with these addresses by interface, whose name resolves to one of them."""

    def of(address: str) -> Any:
        family = machine.socket.AF_INET6 if ":" in address else machine.socket.AF_INET
        return SimpleNamespace(family=family, address=address)

    found = {name: list(map(of, own)) for name, own in addresses.items()}
    up = dict.fromkeys(found, SimpleNamespace(isup=True, speed=0))
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(machine.psutil, "net_if_stats", lambda: up)
    monkeypatch.setattr(machine.socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (resolved, 0))])
    return list(machine.check_network(is_separate))


def test_a_host_is_reached_over_ipv6_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    lo, link = ["127.0.0.1", "::1"], "fe80::1%eth0"
    (found,) = interfaces(monkeypatch, "2001:db8::7", lo=lo, eth0=[link, "2001:db8::7"])
    assert (found.state, found.what) == ("ok", "eth0 2001:db8::7")
    (found,) = interfaces(monkeypatch, "10.0.0.7", lo=lo, eth0=["2001:db8::7", "10.0.0.7"])
    assert (found.state, found.what) == ("ok", "eth0 10.0.0.7")
    (found,) = interfaces(monkeypatch, "::1", lo=lo, eth0=[link])
    assert found.what == "no interface reaches other hosts: this host can only train alone"
    _, found = interfaces(monkeypatch, "127.0.1.1", lo=lo, eth0=["2001:db8::7"])
    assert "resolves to 127.0.1.1: of no use to other hosts" in found.what
    assert found.advice.endswith("such as 2001:db8::7")
    (found,) = interfaces(monkeypatch, "127.0.1.1", is_separate=True, lo=lo, eth0=["2001:db8::7"])
    assert found.state == "ok", "separate jobs do not look for a host's name"


@pytest.mark.parametrize(("gpus", "state"), [(0, "note"), (1, "note"), (2, "problem")])
def test_a_single_rank_needs_no_shared_memory(monkeypatch: pytest.MonkeyPatch, gpus: int, state: str) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=64e6))
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: gpus)
    (found,) = machine.check_shared_memory()
    assert found.state == state


def test_a_shared_folder_is_tried(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    doctor = ["doctor", "--no-exchange", "--rendezvous"]
    for made in (True, False):
        _, out, _ = call_here(*doctor, f"file://{tmp_path}/run")
        line = f"{tmp_path}/run{', made now' * made}, a file of 1 MiB: write "
        assert line in " ".join(out.split())
    code, out, _ = call_here(*doctor, f"file://{tmp_path}/file")
    assert code == 1
    assert f"cannot write in {tmp_path}/file: File exists" in out
