"""Two hosts on one machine: namespaces with a network, a name and an /etc/hosts each, joined by a virtual cable.

What runs on them has real network interfaces and addresses, and no loopback in common. Files are shared, as on a
cluster. Needs root (or its capabilities), unshare, nsenter and ip.
"""

import json
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.harness import REPOSITORY

NIC = "cable0"
NAMES = ("noloco-a", "noloco-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_BEGIN = "hostname $0 && mount --bind $1 /etc/hosts && ip link set lo up && echo ready && exec cat"


class TwoHosts:
    """The hosts, while they exist."""

    def __init__(self, folder: Path, holders: dict[str, int]) -> None:
        self._holders = holders  # of the namespaces: process ids by name
        self.hostfile = folder / "hosts.mpi"
        self.hostfile.write_text("".join(f"{name} slots=2\n" for name in holders))
        self.remote_shell = folder / "rsh"  # takes the place of ssh: HOST COMMAND
        cases = "".join(f"{name}) pid={pid} ;;\n" for name, pid in holders.items())
        self.remote_shell.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
            f'case $1 in {cases}esac\nshift\n{_enter("$pid")} sh -c "cd {REPOSITORY}; $*"\n'
        )
        self.remote_shell.chmod(0o755)

    def on(self, name: str, *command: str) -> list[str]:
        """`command` as to be run here, to run there."""
        there = f"cd {REPOSITORY} && exec {shlex.join(command)}"
        return [*_enter(str(self._holders[name])).split(), "sh", "-c", there]

    def sent_bytes(self, name: str) -> int:
        """Over the cable, since it is there."""
        shown = subprocess.check_output(self.on(name, "ip", "-s", "-j", "link", "show", NIC))
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def _enter(pid: str) -> str:
    return f"nsenter --target {pid} --mount --net --uts"


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Skips the test where such hosts cannot be had."""
    known = folder / "hosts"
    pairs = zip(ADDRESSES, NAMES, strict=True)
    known.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in pairs))
    with ExitStack() as stack:
        holders = {name: stack.enter_context(_holder(name, known)) for name in NAMES}
        first, second = holders.values()
        _run(f"ip link add {NIC} netns {first} type veth peer name {NIC} netns {second}")
        for pid, address in zip(holders.values(), ADDRESSES, strict=True):
            _run(f"nsenter --target {pid} --net ip address add {address}/24 dev {NIC}")
            _run(f"nsenter --target {pid} --net ip link set {NIC} up")
        yield TwoHosts(folder, holders)


@contextmanager
def _holder(name: str, known: Path) -> Iterator[int]:
    """A process that holds the namespaces of one host until its input ends, also when these tests are killed."""
    command = ["unshare", "--mount", "--net", "--uts", "sh", "-c", _BEGIN, name, str(known)]
    try:
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != b"ready\n":
            pytest.skip(f"no namespaces to be had: {holder.stderr.read().decode().strip()}")
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=60)
