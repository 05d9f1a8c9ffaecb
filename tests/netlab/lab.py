"""Hosts on one machine: a network namespace, a host name and an /etc/hosts each. In the lab, the relay joins them.

What runs on them has real network interfaces and addresses, and no loopback in common. Files are shared, as on a
cluster. Needs root (or its capabilities), unshare, nsenter, ip and /dev/net/tun.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from tests.netlab.launcher import Launcher
from tests.netlab.network import Link
from tests.netlab.relay import DEVICE, MTU, SUBNET, address_of, open_tun

NIC = "wan0"
REPOSITORY = Path(__file__).resolve().parents[2]
_HOLD = """
hostname $0 && mount --bind $1 /etc/hosts && ip link set lo up && echo ready || exit 1
cat >/dev/null
running=yes
while [ $running ]; do
    running=
    for process in /proc/[0-9]*; do
        if [ $process != /proc/$$ ] && [ $process/ns/net -ef /proc/$$/ns/net ]; then
            running=yes
            kill -KILL ${process#/proc/}
        fi
    done
done
"""
_SECONDS = 60.0  # for a command that prepares a host
_JOB_SECONDS = 600.0
CUBIC = "cubic"  # what most systems come with


class LabUnavailableError(RuntimeError):
    """This machine does not permit a lab; the message says why."""


class Lab:
    """The hosts, as long as they exist.

    Attributes:
        folder: for files about them; it goes with them.
        names: of the hosts.
        pids: of the processes that hold their namespaces.
        launcher: the mpirun beside this Python.
        hostfile: for it.
        orders: to the relay; None where there is none.
        environ: what it needs to know of the remote shell, which takes the place of ssh. Like that, it passes no
            environment.
    """

    def __init__(self, folder: Path, holders: dict[str, int], slots: int) -> None:
        self.folder = folder
        self._holders = dict(holders)  # of the namespaces: process ids by name
        self.names, self.pids = list(holders), list(holders.values())
        self.orders: IO[bytes] | None = None
        self.launcher = Launcher.beside_python()
        self.hostfile = folder / "hosts.mpi"
        self.hostfile.write_text("".join(f"{name}{self.launcher.slots}{slots}\n" for name in holders))
        remote_shell = folder / "rsh"
        cases = "".join(f"{name}) pid={pid} ;;\n" for name, pid in holders.items())
        remote_shell.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
            f"case $1 in {cases}esac\nshift\n"
            f'exec env -i PATH="$PATH" HOME="$HOME" {_enter("$pid")} sh -c "cd {REPOSITORY}; $*"\n'
        )
        remote_shell.chmod(0o755)
        self.environ = self.launcher.environ(str(remote_shell), NIC)

    def on(self, name: str, *command: str) -> list[str]:
        """Return the command that runs `command` on a host."""
        there = f"cd {REPOSITORY} && exec {shlex.join(command)}"
        return [*_enter(str(self._holders[name])).split(), "sh", "-c", there]

    def mpirun(
        self, options: Sequence[str], module: str, *arguments: str, seconds: float = _JOB_SECONDS
    ) -> str:
        """Run a module of Python, one rank on each host, over TCP alone; returns what it printed.

        Args:
            options: more options of mpirun.

        Raises RuntimeError with what was said when it fails, subprocess.TimeoutExpired after so many seconds.
        """
        environ = {
            **os.environ, **self.environ,
            "GLOO_SOCKET_IFNAME": NIC, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY),
        }  # fmt: skip
        command = self.on(
            self.names[0], *self.launcher.command(str(self.hostfile), len(self.names), NIC),
            *options, sys.executable, "-m", module, *arguments,
        )  # fmt: skip
        finished = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=seconds)
        if finished.returncode:
            raise RuntimeError(f"{module} ended with exit code {finished.returncode}:\n{finished.stderr}")
        return finished.stdout

    @contextmanager
    def behind(self, name: str) -> Iterator[str]:
        """Make a host behind a host of the lab, which becomes its router and translates its address (NAT).

        Nobody can connect to it from the lab. Yields its name. Needs nft. Raises LabUnavailableError.
        """
        home, router = f"home-{name}", self._holders[name]
        subnet = f"192.168.{self.names.index(name)}"
        with _holder(home, self.folder / "hosts") as holder:
            self._holders[home] = holder
            run_in(router, f"ip link add lan0 type veth peer name {NIC} netns {holder}")
            run_in(router, f"ip address add {subnet}.1/24 dev lan0")
            run_in(router, "ip link set lan0 up")
            run_in(router, "sysctl -qw net.ipv4.ip_forward=1")
            run_in(holder, f"ip address add {subnet}.2/24 dev {NIC}")
            run_in(holder, f"ip link set {NIC} up")
            run_in(holder, f"ip route add default via {subnet}.1")
            try:
                run_in(router, "nft add table ip nat")
                run_in(router, "nft add chain ip nat out { type nat hook postrouting priority 100 ; }")
                run_in(router, f"nft add rule ip nat out oif {NIC} masquerade")
            except (FileNotFoundError, subprocess.CalledProcessError):
                raise LabUnavailableError("a router needs nft, of the package nftables") from None
            yield home
            del self._holders[home]

    def cut(self, name: str) -> None:
        """Lose all packets from and to this host from now on; no connection is closed."""
        self._order("cut", name)

    def heal(self, name: str) -> None:
        """Restore the link of a host."""
        self._order("heal", name)

    def _order(self, order: str, name: str) -> None:
        assert self.orders is not None
        self.orders.write(f"{order} {self.names.index(name)}\n".encode())
        self.orders.flush()

    def sent_bytes(self, name: str) -> int:
        """Return the bytes that this host has sent so far."""
        shown = subprocess.check_output(self.on(name, "ip", "-s", "-j", "link", "show", NIC))
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def _enter(pid: str) -> str:
    return f"nsenter --target {pid} --mount --net --uts"


@contextmanager
def hosts(number: int, slots: int = 1, names: Sequence[str] = ()) -> Iterator[Lab]:
    """Make hosts without a network, for the context.

    Args:
        slots: ranks of each host, for mpirun.
        names: of all hosts, which resolve to `address_of`; by default lab0, lab1, ...

    Raises LabUnavailableError.
    """
    names = names or [f"lab{host}" for host in range(number)]
    addresses = "".join(f"{address_of(host)} {name}\n" for host, name in enumerate(names))
    with TemporaryDirectory(prefix="netlab-") as folder, ExitStack() as stack:
        known = Path(folder) / "hosts"
        known.write_text(f"127.0.0.1 localhost\n{addresses}")
        holders = {name: stack.enter_context(_holder(name, known)) for name in names}
        yield Lab(Path(folder), holders, slots)


@contextmanager
def lab(links: Sequence[Link], congestion: str = CUBIC, names: Sequence[str] = ()) -> Iterator[Lab]:
    """Make a host for each link, joined by the relay, for the context.

    Args:
        congestion: TCP's congestion control.
        names: see `hosts`.

    Raises LabUnavailableError.
    """
    with hosts(len(links), names=names) as there, ExitStack() as stack:
        with ExitStack() as devices:
            files = []
            for host, pid in enumerate(there.pids):
                file, device = _tun()
                devices.callback(os.close, file)
                files.append(file)
                run(f"ip link set {device} netns {pid}")
                run_in(pid, f"ip link set {device} name {NIC} mtu {MTU} txqueuelen 10000 up")
                run_in(pid, f"ip address add {address_of(host)}/24 dev {NIC} noprefixroute")
                # By route: a namespace may not always choose for all of its connections.
                run_in(pid, f"ip route add {SUBNET}.0/24 dev {NIC} congctl {congestion}")
            there.orders = stack.enter_context(_relay(links, files))
        yield there


@contextmanager
def _holder(name: str, known: Path) -> Iterator[int]:
    """Start a process that holds a host's namespaces until its input ends, also when this process is killed.

    Then it ends what still runs on the host. In a session of its own: a signal for this process's group, as of
    Ctrl-C, must not end it before that.
    """
    command = ["unshare", "--mount", "--net", "--uts", "sh", "-c", _HOLD, name, str(known)]
    pipe = subprocess.PIPE
    try:
        holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except FileNotFoundError:
        raise LabUnavailableError("there is no unshare on this machine") from None
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != b"ready\n":
            said = holder.stderr.read().decode().strip()
            raise LabUnavailableError(f"network namespaces are not permitted here: {said}")
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


@contextmanager
def _relay(links: Sequence[Link], devices: list[int]) -> Iterator[IO[bytes]]:
    """Start the relay; yields its input."""
    fields = json.dumps([asdict(link) for link in links])
    command = [sys.executable, "-m", "tests.netlab.relay", fields, *map(str, devices)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=devices, cwd=REPOSITORY
    )
    with process:
        assert process.stdin is not None
        try:
            yield process.stdin
        finally:
            process.stdin.close()


def _tun() -> tuple[int, str]:
    try:
        return open_tun()
    except OSError as error:
        raise LabUnavailableError(f"{DEVICE} cannot be used here: {error.strerror}") from None


def run(command: str) -> None:
    """Run a command that prepares hosts."""
    subprocess.run(command.split(), check=True, timeout=_SECONDS)


def run_in(pid: int, command: str) -> None:
    """Run such a command in the network namespace of a host."""
    run(f"nsenter --target {pid} --net {command}")
