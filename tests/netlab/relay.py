"""The process that carries the packets between the hosts of a lab: a TUN device for each, a `Network` in between.

    python -m tests.netlab.relay LINKS FD FD ...

LINKS is a JSON list with the arguments of each host's `Link`. The FDs are the open TUN devices, in
the order of the links; host i has the address 10.77.0.(i + 1). A line "cut I" of its input cuts the link of host
I, "heal I" mends it. It ends when its input does.

The kernel hands over what a TCP connection sends at a time as one large packet (segmentation offload), and takes
it so. This process then has fewer packets to carry, while those of the emulated wire have 1500 bytes.
"""

import contextlib
import fcntl
import json
import os
import select
import struct
import sys
import time

from tests.netlab.network import Link, Network

DEVICE = "/dev/net/tun"
MTU = 1500
SUBNET = "10.77.0"

_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0  # ioctls of linux/if_tun.h
_TUN, _NO_INFORMATION, _OFFLOAD_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _TCP_SEGMENTS = 0x01, 0x02
_HEADER = struct.Struct(
    "=BBHHHH"
)  # virtio_net_hdr: flags, kind, bytes of headers, of a segment, checksum's place
_LONGEST = _HEADER.size + 65536
_IP_VERSION, _IP_DESTINATION_END = _HEADER.size, _HEADER.size + 19
_GRAIN_SECONDS = 3e-4  # packets are handed over that much late, but several at a time


def address_of(host: int) -> str:
    """Return the address of a host in the lab."""
    return f"{SUBNET}.{host + 1}"


def open_tun() -> tuple[int, str]:
    """Make a TUN device in this network namespace, which exists while it is open; returns descriptor and name."""
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", b"netlab%d", _TUN | _NO_INFORMATION | _OFFLOAD_HEADER)
    name = fcntl.ioctl(device, _SET_INTERFACE, request)[:16].rstrip(b"\0").decode()
    fcntl.ioctl(device, _SET_OFFLOAD, _CHECKSUMS | _TCP_SEGMENTS)
    return device, name


def size_on_the_wire(packet: bytes) -> int:
    """Return the bytes of the IP packets that a network card would have sent for it."""
    _, kind, headers, segment, _, _ = _HEADER.unpack_from(packet)
    size = len(packet) - _HEADER.size
    if not kind:
        return size
    segments = -(-(size - headers) // segment)
    return size + (segments - 1) * headers


def obey(network: Network, lines: bytes) -> None:
    """Cut and heal links."""
    for line in lines.splitlines():
        order, host = line.split()
        (network.cut.add if order == b"cut" else network.cut.discard)(int(host))


def carry(devices: list[int], network: Network, orders: int) -> None:
    """Carry packets until `orders` ends."""
    poll = select.epoll()
    for file in (*devices, orders):
        poll.register(file, select.EPOLLIN)
    hosts = {device: host for host, device in enumerate(devices)}
    while True:
        wait = network.next_event() - time.monotonic()
        ready = poll.poll(min(max(wait, 0.0), 1.0))  # rounded up to milliseconds
        now = time.monotonic()
        for file, _ in ready:
            if file == orders:
                if not (lines := os.read(orders, _LONGEST)):
                    return
                obey(network, lines)
                continue
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(file, _LONGEST)
                    host = packet[_IP_DESTINATION_END] - 1
                    if packet[_IP_VERSION] >> 4 == 4 and host < len(devices):  # not what IPv6 says to nobody
                        network.send(now, hosts[file], host, size_on_the_wire(packet), packet)
        for host, packet in network.received(time.monotonic()):
            with contextlib.suppress(BlockingIOError):  # the host's queue is full: lost
                os.write(devices[host], packet)
        if ready:
            time.sleep(_GRAIN_SECONDS)


def main() -> None:
    network = Network([Link(**fields) for fields in json.loads(sys.argv[1])])
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # the hosts' own work must not change their network
    carry([int(file) for file in sys.argv[2:]], network, sys.stdin.fileno())


if __name__ == "__main__":
    main()
