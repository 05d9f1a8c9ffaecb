"""Streams through a folder, whose owner, other processes and disk may do what they like."""

import asyncio
import errno
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_noloco.errors import UserError
from megatron_noloco.federation import folder_stream
from megatron_noloco.federation.folder import FolderCarrier
from megatron_noloco.federation.folder_stream import HEAD
from megatron_noloco.federation.keys import Checksum, Cipher, Keys, Sealing
from megatron_noloco.federation.messages import Address
from megatron_noloco.federation.rendezvous import Folder
from megatron_noloco.federation.store import Store, seconds_of_calls
from megatron_noloco.federation.streams import RefusedError, Serve, Stream, StreamEndedError
from tests.unit import nodes
from tests.unit.shared_folders import FakeBucket, bucket

SECONDS = 3000.0
OTHER_KEY = Cipher(b"other")


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive(1))


@asynccontextmanager
async def two(
    store: Store,
    sealings: tuple[Sealing, Sealing] = (Checksum(), Checksum()),
    serve: Serve = echo,
    told: Callable[[str], object] = print,
) -> AsyncIterator[tuple[FolderCarrier, FolderCarrier]]:
    here, there = (FolderCarrier(store, slot, sealings[slot], told) for slot in range(2))
    await there.listen(serve)
    try:
        async with asyncio.timeout(SECONDS):
            yield here, there
    finally:
        await here.close()
        await there.close()


async def ask(here: FolderCarrier, endpoint: str) -> None:
    async with await here.dial(endpoint) as stream:
        await stream.send(b"1")
        await stream.receive(1)


def files_in(path: Path) -> list[str]:
    return sorted(file.name for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("sealings", "why", "reason"),
    [
        ((Cipher(b"own"), OTHER_KEY), "of a process with another key", "of a process with another key"),
        ((Checksum(), OTHER_KEY), "is not encrypted", "is encrypted"),
        ((OTHER_KEY, Checksum()), "is encrypted", "is not encrypted"),
    ],
    ids=["another key", "one has no key", "the other has none"],
)
async def test_another_key_is_one_line_on_both_sides(
    sealings: tuple[Sealing, Sealing], why: str, reason: str, tmp_path: Path
) -> None:
    lines = list[str]()
    async with two(Store.of(tmp_path.as_uri()), sealings, told=lines.append) as (here, there):
        for _ in range(2):
            with pytest.raises(RefusedError, match=reason) as ended:
                await ask(here, there.endpoint)
            assert "\n" not in str(ended.value)
    (line,) = lines
    assert why in line


def test_a_cipher_is_that_of_the_key_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Keys.make(tmp_path / name)
    sealed = Cipher.read(tmp_path / "a").seal("name", b"content")
    assert b"content" not in sealed
    assert Cipher.read(tmp_path / "a").open("name", sealed) == b"content"
    for cipher, name in [(Cipher.read(tmp_path / "b"), "name"), (Cipher.read(tmp_path / "a"), "other")]:
        with pytest.raises(ValueError):
            cipher.open(name, sealed)


@pytest.mark.parametrize("sealing", [Checksum(), Cipher(b"key")], ids=["plain", "encrypted"])
def test_a_wrapped_file_that_was_changed_is_not_opened(sealing: Sealing) -> None:
    draws = np.random.default_rng(0)
    sealed = sealing.seal("name", b"0123456789")
    for _ in range(200):
        changed = bytearray(sealed)
        changed[draws.integers(len(sealed))] ^= 1 << int(draws.integers(8))
        with pytest.raises(ValueError):
            sealing.open("name", bytes(changed))
    for length in range(len(sealed)):
        with pytest.raises(ValueError):
            sealing.open("name", sealed[:length])
    assert sealing.open("name", sealed) == b"0123456789"


class Meddled(FakeBucket):
    """A bucket whose owner does something to one file of data, when it is written."""

    def __init__(self, meddle: Callable[["Meddled", str, bytes], None], number: int) -> None:
        super().__init__(delay=0.0)
        self._meddle, self._ending = meddle, f".d{number}"
        self.before = dict[str, bytes]()

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        write = super().pipe_file
        if path.endswith(self._ending):
            self._meddle(self, path, value)
        else:
            self.before[path] = value
            write(path, value, **options)

    def put(self, path: str, value: bytes) -> None:
        super().pipe_file(path, value)


def _cut(store: Meddled, path: str, value: bytes) -> None:
    store.put(path, value[: len(value) // 2])


def _repeat(store: Meddled, path: str, value: bytes) -> None:
    store.put(path, store.before[path[:-1] + "0"])


@pytest.mark.parametrize("meddle", [_cut, _repeat])
@pytest.mark.parametrize("sealing", [Checksum(), Cipher(b"key")], ids=["plain", "encrypted"])
async def test_a_file_that_somebody_changes_ends_its_stream(
    meddle: Callable[[Meddled, str, bytes], None], sealing: Sealing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_stream, "FILE_BYTES", 10)
    ended = list[str]()

    async def serve(stream: Stream) -> None:
        try:
            await stream.receive(30)
        except StreamEndedError as error:
            ended.append(str(error))
            raise

    store = Meddled(meddle, 1)
    async with two(bucket(files=store), (sealing, sealing), serve) as (here, there):
        stream = await here.dial(there.endpoint)
        await stream.send(bytes(30))
        with pytest.raises(StreamEndedError):
            await stream.receive(1)
    assert ".0.d1 is " in ended[0]


async def test_a_stream_that_is_written_again_does_not_begin_again(tmp_path: Path) -> None:
    store = Store.of(tmp_path.as_uri())
    served = list[bytes]()

    async def serve(stream: Stream) -> None:
        served.append(await stream.receive(1))
        await stream.send(b"2")

    written = dict[Path, bytes]()

    async with two(store, (Cipher(b"k"), Cipher(b"k")), serve) as (here, there):
        put = store.put

        def spied(name: str, content: bytes) -> None:
            if name.startswith("00001"):
                written[tmp_path / name] = content
            put(name, content)

        here._folder.put = spied  # type: ignore[method-assign]
        await ask(here, there.endpoint)
        assert len(written) >= 1
        for path, content in written.items():
            path.write_bytes(content)
        while any(path.exists() for path in written):
            await asyncio.sleep(0.01)
    assert served == [b"1"]


async def test_nothing_is_left(tmp_path: Path) -> None:
    """Neither of streams that were closed, nor of streams that were aborted, nor of processes that leave."""

    async with two(Store.of(tmp_path.as_uri())) as (here, there):
        for number in range(6):
            with suppress(ArithmeticError, StreamEndedError):
                async with await here.dial(there.endpoint) as stream:
                    await stream.send(b"1")
                    await stream.receive(1)
                    if number % 2:
                        raise ArithmeticError
        while files_in(tmp_path) != ["open", "open"]:
            await asyncio.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


async def test_process_removes_leftovers_of_its_slot(tmp_path: Path) -> None:
    left, of_another = (tmp_path / f"0000{slot}-{16 * 'a'}" for slot in (1, 2))
    for inbox in (left, of_another):
        inbox.mkdir()
        (inbox / "open").write_bytes(b"-")

    async with two(Store.of(tmp_path.as_uri())) as (here, _):
        assert not left.exists()
        assert of_another.exists()
        with pytest.raises(StreamEndedError, match=f"nobody listens at folder://{left.name}"):
            await ask(here, f"folder://{left.name}")


async def test_later_process_ends_streams_of_earlier(tmp_path: Path) -> None:
    lines = list[str]()
    async with two(Store.of(tmp_path.as_uri()), told=lines.append) as (here, there):
        later = FolderCarrier(Store.of(tmp_path.as_uri()), 0, Checksum(), lines.append)
        stream = await here.dial(there.endpoint)
        await stream.send(b"1")
        await stream.receive(1)
        await later.listen(echo)
        with pytest.raises(StreamEndedError, match="a later process of this slot has begun"):
            await stream.receive(1)
        assert here.is_replaced
        assert not any(carrier.is_replaced for carrier in (there, later))
        await later.close()
        shutil.rmtree(tmp_path)
        await nodes.until(lambda: len(lines) > 2)
        assert not there.is_replaced
    assert "replica 0 was here before, and has not left" in lines[0]
    assert "a later process of this slot has begun" in lines[1]
    assert "was removed: another program did it" in lines[2]


@pytest.mark.parametrize("kind", ["write", "list", "read"])
async def test_a_store_that_fails_is_named(kind: str) -> None:
    """A file that cannot be written ends its stream; what cannot be read is read later."""

    class Failing(FakeBucket):
        fails = False

        def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
            self._fail_if("write")
            super().pipe_file(path, value, **options)

        def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
            self._fail_if("list")
            return super().ls(path, detail, **options)

        def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
            self._fail_if("read")
            return super().cat_file(path, start, end, **options)

        def _fail_if(self, what: str) -> None:
            if self.fails and kind == what:
                raise OSError(errno.ENOSPC, "No space left on device")

    files, reason, lines = Failing(), f"cannot {kind} .*: No space left", list[str]()
    async with two(bucket(files=files), told=lines.append) as (here, there):
        stream = await here.dial(there.endpoint)
        await stream.send(b"1")
        await stream.receive(1)
        files.fails = True
        await stream.send(b"1")
        if kind == "write":
            with pytest.raises(StreamEndedError, match=reason):
                await stream.receive(1)
        await asyncio.sleep(10)
        files.fails = False
        if kind == "write":
            await ask(here, there.endpoint)
        else:
            await stream.receive(1)
    assert [re.match(reason, line) is not None for line in lines] == [True] * len(lines) != []
    assert len(lines) <= 2, "one of each process"


# Files of others


async def test_files_of_strangers_disturb_nothing_and_are_named_once(tmp_path: Path) -> None:
    """Some have a name of ours. A folder is among them."""
    dialler, others = f"00009-{16 * 'b'}", ["notes.txt", "\u202e.d0"]

    lines = list[str]()
    async with two(Store.of(tmp_path.as_uri()), told=lines.append) as (here, there):
        inbox = tmp_path / there.endpoint.removeprefix("folder://")
        for name in (
            *others,
            *(f"{dialler}.{one}" for one in ("0.d0", "1.d0", "2.d7", "3.c0", "4.d0.a.partial")),
        ):
            (inbox / name).write_bytes(b"hello" * 100)
        (inbox / "a folder").mkdir()
        for _ in range(3):
            await ask(here, there.endpoint)
        await asyncio.sleep(5)
        unwanted = [f"{dialler}.{one}" for one in ("2.d7", "3.c0", "4.d0.a.partial")]
        assert files_in(inbox) == sorted(["open", *others, *unwanted])
    (refused,) = (line for line in lines if "refused" in line)
    assert re.match(r"a process is refused: .* is damaged, or of another version$", refused)
    lines.remove(refused)
    assert len(lines) == 3
    assert all(line.endswith(" is no file of an exchange, and is left alone") for line in lines)


heads = st.tuples(st.sampled_from((0, 1, 7, 2**64 - 1)), st.booleans()).map(lambda head: HEAD.pack(*head))
said = st.one_of(st.binary(max_size=12), st.tuples(heads, st.binary(max_size=20)).map(b"".join))
places = st.tuples(st.sampled_from("cd"), st.sampled_from((0, 1, 2, 3, 5, 10**12 - 1)))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2), places, said), max_size=12))
def test_whatever_a_member_writes_another_stream_goes_on(
    written: list[tuple[int, tuple[str, int], bytes]],
) -> None:
    """A member that lies can end streams of its own."""
    liar = f"00009-{16 * 'b'}"
    store = bucket(delay=0.0)

    lines = list[str]()

    async def main() -> None:
        async with two(store, (OTHER_KEY, OTHER_KEY), told=lines.append) as (here, there):
            inbox = there.endpoint.removeprefix("folder://")
            async with await here.dial(there.endpoint) as stream:
                await stream.send(b"1")
                for number, (kind, place), content in written:
                    path = f"{inbox}/{liar}.{number}.{kind}{place}"
                    store.put(path, OTHER_KEY.seal(path, content))
                    await stream.receive(1)
                    await stream.send(b"2")
                await stream.receive(1)
            await ask(here, there.endpoint)

    nodes.run(main())
    assert lines == []


async def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    carrier = FolderCarrier(Store.of((tmp_path / "file").as_uri()), 0, Checksum(), print)
    with pytest.raises(OSError, match=r"^cannot write in /.*: File exists$"):
        await carrier.listen(echo)
    with pytest.raises(ConnectionError, match="cannot write"):
        await carrier.dial(f"folder://00001-{16 * 'a'}")
    with pytest.raises(ConnectionError, match="no other process"):
        await carrier.dial("folder://../../etc")
    await carrier.close()
    for url in ("nonsense://bucket", "file://~nobody-has-this-name/run"):
        with pytest.raises(UserError, match=url.partition(":")[0]):
            Store.of(url)


@pytest.mark.parametrize("streams", [1, 8])
async def test_a_process_at_rest_makes_few_requests(streams: int) -> None:
    """However many streams it has; and so many files of data as their size demands."""
    store = bucket(delay=0.0)

    async with two(store) as (here, there):
        opened = [await here.dial(there.endpoint) for _ in range(streams)]
        waiting = []
        for stream in opened:
            await stream.send(b"1")
            await stream.receive(1)
            waiting.append(asyncio.create_task(stream.receive(1)))
        await asyncio.sleep(100)
        before = store.calls.copy()
        await asyncio.sleep(100)
        made = store.calls - before
        assert set(made) == {"list"}
        assert 98 <= made["list"] <= 102, "of two processes, every two seconds"
        for stream in opened:
            stream.abort("over")
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_bytes_have_as_many_files_as_their_size_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_stream, "FILE_BYTES", 1000)
    store = bucket()

    async def serve(stream: Stream) -> None:
        await stream.receive(20_000)

    async with two(store, serve=serve) as (here, there), await here.dial(there.endpoint) as stream:
        await stream.send(bytes(20_000))
    # Two inboxes, the data, the two ends (one may be with data), the end of a process, and of every two files at
    # most one that says how many were read.
    assert 23 <= store.calls["put"] <= 25 + 10


def test_a_bucket_gives_what_others_published() -> None:
    store = bucket()
    folder, of_another_run = Folder(store, 1, {"model": "a"}), Folder(store, 2, {"model": "b"})
    assert folder.look() == ({}, (), "")
    of_another_run.publish(1, Address("tcp://c:4", 12))
    assert "its job differs from this one in model" in folder.why_alone()
    folder.publish(0, Address("", 10))
    folder.publish(3, Address("tcp://c:3", 11))
    folder.publish(0, Address("", 13))
    assert folder.look() == ({0: Address("", 13), 3: Address("tcp://c:3", 11)}, (), "")


def test_a_folder_is_tried_as_it_is_used() -> None:
    store = bucket()
    assert list(seconds_of_calls(store)) == ["write", "list", "read", "remove"]
    assert store.names() == []
    with pytest.raises(OSError, match=r"^cannot write .*: 503 Slow Down$"):
        seconds_of_calls(bucket(failures=1.0))


@pytest.mark.slow
def test_a_real_server() -> None:
    """S3 over HTTP: what is sent arrives, the last file is removed, and another bucket is named."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    import s3fs

    options = {"key": "a", "secret": "b", "endpoint_url": f"http://{host}:{port}"}
    files = s3fs.S3FileSystem(**options, use_listings_cache=False, skip_instance_cache=True)
    files.mkdir("bucket")
    content = np.random.default_rng(0).bytes(40_000_000)

    async def swap(stream: Stream) -> None:
        received = bytearray(len(content))
        await asyncio.gather(stream.send(content), stream.fill(received))
        assert received == content

    async def main() -> None:
        store, key = bucket(files=files, url="s3://bucket/run"), Cipher(b"k")
        async with two(store, (key, key), swap) as (here, there):
            for _ in range(2):
                async with await here.dial(there.endpoint) as stream:
                    await swap(stream)
            while len(files.find("bucket")) > 2:  # the marks of the two processes
                await asyncio.sleep(0.1)

    asyncio.run(main())
    assert files.find("bucket") == []
    lines = asyncio.run(_opened(bucket(files=files, url="s3://other/run")))
    assert "s3://other/run" in lines
    server.stop()


async def _opened(store: Store) -> str:
    carrier = FolderCarrier(store, 0, Checksum(), print)
    try:
        await carrier.listen(echo)
    except OSError as error:
        return str(error)
    finally:
        await carrier.close()
    return ""
