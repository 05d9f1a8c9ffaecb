"""A conversation is the same bytes on both sides, and its end is its end on both sides."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_noloco.federation import tcp
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.streams import Carrier, Serve, Stream, StreamEndedError
from megatron_noloco.federation.tcp import TcpCarrier
from tests.unit.memory_streams import Faults, MemoryCarrier
from tests.unit.shared_folders import FOLDERS, two_in_a_folder

pytestmark = pytest.mark.real_clock
SECONDS = 60.0  # for what takes milliseconds


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys.make(tmp_path_factory.mktemp("keys") / "key")


@asynccontextmanager
async def two(kind: str, keys: Keys, serve: Serve) -> AsyncIterator[tuple[Carrier, str]]:
    """A carrier, and the endpoint of another one that serves."""
    carriers: list[Carrier]
    if kind == "memory":
        places: dict[str, Serve] = {}
        carriers, endpoint = [MemoryCarrier(places, "here"), MemoryCarrier(places, "there")], "there"
    elif kind in FOLDERS:
        carriers, endpoint = two_in_a_folder(kind)
    else:
        own = keys if kind == "TLS" else None
        listener = socket.create_server(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        carriers = [TcpCarrier(own), TcpCarrier(own, listener)]
    await carriers[1].listen(serve)
    try:
        async with asyncio.timeout(SECONDS):
            yield carriers[0], endpoint
    finally:
        for carrier in carriers:
            await carrier.close()


kinds = pytest.mark.parametrize("kind", ["memory", "tcp", "TLS", *FOLDERS])


@kinds
async def test_both_sides_get_the_bytes_of_the_other(kind: str, keys: Keys) -> None:
    """In pieces that other pieces fill, both ways at once, with more than any buffer holds."""
    draws = np.random.default_rng(0)
    contents = [draws.bytes(5_000_000) for _ in range(2)]

    async def swap(stream: Stream, own: int) -> None:
        pieces = np.random.default_rng(own)
        received = bytearray(len(contents[0]))

        async def send() -> None:
            start = 0
            while start < len(contents[own]):
                stop = start + int(pieces.integers(1, 700_000))
                await stream.send(contents[own][start:stop], b"")
                start = stop

        async def fill() -> None:
            start = 0
            while start < len(received):
                stop = min(len(received), start + int(pieces.integers(1, 700_000)))
                await stream.fill(memoryview(received)[start:stop])
                start = stop

        await asyncio.gather(send(), fill())
        assert received == contents[1 - own]

    async with two(kind, keys, lambda stream: swap(stream, 1)) as (carrier, endpoint):
        for _ in range(3):
            async with await carrier.dial(endpoint) as stream:
                await swap(stream, 0)


@kinds
async def test_a_buffer_may_be_changed_when_it_is_sent(kind: str, keys: Keys) -> None:
    size = 3_000_000

    async def serve(stream: Stream) -> None:
        for value in range(4):
            await asyncio.sleep(0.05)
            assert await stream.receive(size) == bytes([value]) * size

    async with two(kind, keys, serve) as (carrier, endpoint):
        buffer = bytearray(size)
        async with await carrier.dial(endpoint) as stream:
            for value in range(4):
                buffer[:] = bytes([value]) * size
                await stream.send(buffer)
            buffer[:] = bytes([9]) * size


@kinds
@pytest.mark.parametrize("sends", [False, True], ids=["it receives", "it sends"])
async def test_the_reason_of_an_abort_reaches_the_other_side(kind: str, sends: bool, keys: Keys) -> None:
    reasons = list[str]()

    async def serve(stream: Stream) -> None:
        try:
            while sends:
                await stream.send(bytes(100_000))
            await stream.receive(10)
        except StreamEndedError as error:
            reasons.append(str(error))
            raise

    async with two(kind, keys, serve) as (carrier, endpoint):
        with suppress(ArithmeticError):
            async with await carrier.dial(endpoint) as stream:
                await stream.send(b"123")
                if sends:
                    await stream.receive(300_000)
                raise ArithmeticError("the mean is not finite")
        while not reasons:
            await asyncio.sleep(0.01)
        with pytest.raises(StreamEndedError, match="not finite"):
            await stream.send(b"4")
    assert reasons == ["the mean is not finite"]


@pytest.mark.parametrize("kind", ["tcp", "TLS"])
async def test_sending_to_a_lost_connection_ends(kind: str, keys: Keys) -> None:
    """The socket fails in a write. asyncio then drops what is written, and says so once the sender yields."""
    lost, tried = asyncio.Event(), list[int]()

    def socket_of(stream: Stream) -> Any:
        transport: Any = stream._connection._transport  # type: ignore[attr-defined]
        return transport._ssl_protocol._transport if kind == "TLS" else transport

    async def serve(stream: Stream) -> None:
        await stream.receive(3)
        socket_of(stream).pause_reading()  # so only a write can notice the end
        await lost.wait()
        for number in range(1000):
            tried.append(number)
            await stream.send(bytes(10_000))

    async with two(kind, keys, serve) as (carrier, endpoint):
        stream = await carrier.dial(endpoint)
        await stream.send(b"123")
        await asyncio.sleep(0.1)
        socket_of(stream).abort()
        await asyncio.sleep(0.1)
        lost.set()
        while not tried:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    assert len(tried) < 1000


@kinds
@pytest.mark.parametrize("how", ["time-out", "cancelled", "too much", "too little", "closed early"])
async def test_a_conversation_ends_on_both_sides(how: str, kind: str, keys: Keys) -> None:
    ended = list[str]()

    async def serve(stream: Stream) -> None:
        try:
            async with stream:
                await stream.send(b"12345")
                if how in ("time-out", "cancelled"):
                    await stream.receive(1)
        except (StreamEndedError, TimeoutError) as error:
            ended.append(str(error))
            raise

    async def converse(carrier: Carrier, endpoint: str) -> None:
        async with await carrier.dial(endpoint) as stream:
            await stream.receive({"too much": 4, "too little": 6}.get(how, 5))
            if how in ("time-out", "cancelled"):
                await stream.receive(1)

    async with two(kind, keys, serve) as (carrier, endpoint):
        match how:
            case "time-out":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await converse(carrier, endpoint)
            case "cancelled":
                task = asyncio.ensure_future(converse(carrier, endpoint))
                await asyncio.sleep(0.5)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            case "too little":
                with pytest.raises(StreamEndedError, match="before its end"):
                    await converse(carrier, endpoint)
            case _:
                await converse(carrier, endpoint)
        if how in ("time-out", "cancelled"):
            while not ended:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("way", [0, 1])
def test_a_stream_that_is_cut_at_any_byte_ends_on_both_sides(way: int) -> None:
    """With all bytes but the last cut, nobody waits for ever, and a side that lost bytes has an error."""

    async def swap(stream: Stream, outcomes: list[bool]) -> None:
        try:
            await asyncio.gather(stream.send(bytes(20)), stream.receive(20))
        except ConnectionError:
            outcomes.append(False)
            raise
        outcomes.append(True)

    async def conversation(faults: Faults) -> list[bool]:
        places: dict[str, Serve] = {}
        outcomes = list[bool]()
        here, there = MemoryCarrier(places, "here", faults), MemoryCarrier(places, "there")
        await there.listen(lambda stream: swap(stream, outcomes))
        async with asyncio.timeout(SECONDS):
            try:
                async with await here.dial("there") as stream:
                    await swap(stream, outcomes)
            except ConnectionError:
                pass
            await here.close()
        return outcomes

    for cut in range(1, 20):
        outcomes = asyncio.run(conversation(lambda number, cut=cut: (cut, None) if way == 0 else (None, cut)))
        assert False in outcomes
    assert asyncio.run(conversation(lambda number: (None, None))) == [True, True]


encrypted = pytest.mark.parametrize("kind", ["tcp", "TLS"])


async def echo(stream: Stream) -> None:
    first = await stream.receive(1)
    stream.admit()
    await stream.send(first)


async def ask(carrier: Carrier, endpoint: str) -> None:
    async with await carrier.dial(endpoint) as stream:
        await stream.send(b"?")
        assert await stream.receive(1) == b"?"


@encrypted
async def test_streams_one_after_the_other_share_a_connection(kind: str, keys: Keys) -> None:
    async with two(kind, keys, echo) as (carrier, endpoint):
        assert isinstance(carrier, TcpCarrier)
        for _ in range(20):
            await ask(carrier, endpoint)
        assert len(carrier._connections) == 1
        await asyncio.gather(*(ask(carrier, endpoint) for _ in range(3)))
        assert len(carrier._connections) == 3
        with pytest.raises(ArithmeticError):
            async with await carrier.dial(endpoint):
                raise ArithmeticError
        assert len(carrier._connections) == 2
        await ask(carrier, endpoint)


async def test_a_reason_of_another_process_is_a_short_line(keys: Keys) -> None:
    async def serve(stream: Stream) -> None:
        stream.abort("\x1b[2J\n" + 5000 * "a")

    async with two("TLS", keys, serve) as (carrier, endpoint):
        with pytest.raises(StreamEndedError) as ended:
            await ask(carrier, endpoint)
        assert str(ended.value).isprintable()
        assert len(str(ended.value)) <= 500


async def test_another_key_nobody_and_no_listener_are_named(keys: Keys, tmp_path: Path) -> None:
    async with two("TLS", keys, echo) as (carrier, endpoint):
        with pytest.raises(ConnectionError, match=f"^the process at {endpoint} has another key$"):
            await ask(TcpCarrier(Keys.make(tmp_path / "other")), endpoint)
        async with two("tcp", keys, echo) as (_, unencrypted):
            with pytest.raises(ConnectionError, match=f"^{unencrypted} cannot be joined: only one of"):
                await ask(carrier, unencrypted)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"^nobody answers at {nobody}: "):
            await carrier.dial(nobody)
        with pytest.raises(ConnectionError, match=r"^nobody answers at tcp://no\.such\.host\.invalid:1: "):
            await carrier.dial("tcp://no.such.host.invalid:1")
        await ask(carrier, endpoint)


async def test_a_stream_says_who_has_shown_the_key(keys: Keys, tmp_path: Path) -> None:
    """Whoever shows no certificate is a stranger; a wrong certificate is refused, on either side."""
    served = list[bool]()

    async def serve(stream: Stream) -> None:
        served.append(stream.is_member)
        await echo(stream)

    other = Keys.make(tmp_path / "other")
    other.dials.verify_mode = ssl.CERT_NONE  # as an attacker's
    member_of_other = replace(other, fingerprint=keys.fingerprint)

    async with two("TLS", keys, serve) as (carrier, endpoint):
        await ask(carrier, endpoint)
        await ask(TcpCarrier(Keys.of_newcomer(keys.fingerprint)), endpoint)
        assert served == [True, False]
        with pytest.raises(ConnectionError):
            await ask(TcpCarrier(member_of_other), endpoint)
        with pytest.raises(ConnectionError, match="has another key"):
            await ask(TcpCarrier(Keys.of_newcomer(other.fingerprint)), endpoint)
        assert served == [True, False]


def greeting(encrypted: bool) -> bytes:
    """Return the first bytes of a connection."""
    return tcp._MAGIC + bytes([tcp.VERSION, encrypted])


async def test_first_bytes_say_why_streams_are_refused(keys: Keys) -> None:
    """The process that listens tells it as well."""
    told = list[str]()
    refused = {
        b"GET / ": "no job of megatron_noloco",
        tcp._MAGIC + bytes([tcp.VERSION - 1, 0]): f"speaks version {tcp.VERSION - 1} of the protocol",
        greeting(encrypted=True): "only one of the two sides encrypts",
    }

    with socket.create_server(("127.0.0.1", 0)) as listener:
        carrier = TcpCarrier(None, listener, told.append)
        await carrier.listen(echo)
        for first in refused:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(first)
            assert (await reader.read())[: len(greeting(False))] == greeting(False)
            writer.close()
        await carrier.close()
    assert [why in line for why, line in zip(refused.values(), told, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes([0, 0, 0, 1]),  # a begin with content
        bytes([1, 0, 0, 0]),  # data without any
        bytes([1, 255, 255, 255]),
        bytes([2, 0, 0, 0]),  # the close of no stream
        bytes([0, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0]),
        bytes([3, 255, 255, 255]),
        bytes([9, 0, 0, 0]),
    ],
)
async def test_a_frame_that_no_member_sends_ends_its_connection_only(content: bytes, keys: Keys) -> None:
    async with two("tcp", keys, echo) as (carrier, endpoint):
        await ask(carrier, endpoint)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rpartition(":")[2]))
        writer.write(greeting(encrypted=False) + content)
        with suppress(ConnectionResetError):
            await reader.read()  # to the end of the connection
        writer.close()
        await ask(carrier, endpoint)


async def test_a_stranger_has_little_time(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_OPEN_SECONDS", 0.2)

    async def serve(stream: Stream) -> None:
        if await stream.receive(1) == b"m":
            stream.admit()
        await stream.receive(1)

    async with two("tcp", keys, serve) as (_, endpoint):

        async def lasts(first: bytes) -> bool:
            async with await TcpCarrier(None).dial(endpoint) as stream:
                await stream.send(first)
                try:
                    async with asyncio.timeout(1):
                        await stream.receive(1)
                except TimeoutError:
                    await stream.send(b".")
                    return True
            raise AssertionError

        assert await lasts(b"m")
        with pytest.raises(StreamEndedError):
            await lasts(b"s")


@pytest.mark.parametrize("kind", ["tcp", *FOLDERS])
async def test_a_receiver_that_is_not_ready_holds_the_sender(kind: str, keys: Keys) -> None:
    sent = 0

    async def serve(stream: Stream) -> None:
        await asyncio.sleep(2)

    async with two(kind, keys, serve) as (carrier, endpoint):
        with suppress(TimeoutError):
            async with await carrier.dial(endpoint) as stream, asyncio.timeout(1):
                while True:
                    await stream.send(bytes(2**20))
                    sent += 2**20
    assert 0 < sent < 100 * 2**20  # the buffers of the kernel, or the window of a folder
