"""Members that share a folder, whose owner, other processes and disk may do what they like."""

import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.errors import UserError
from megatron_noloco.federation import folder_carrier, folder_members
from megatron_noloco.federation.folder_carrier import FolderCarrier
from megatron_noloco.federation.keys import Keys, Seal
from megatron_noloco.federation.mesh import (
    MOST_NAME_CHARACTERS,
    Fetch,
    Member,
    Mesh,
    Patience,
    RefusedError,
)
from megatron_noloco.federation.statuses import PeerStatus, Statuses
from megatron_noloco.federation.store import Store
from megatron_noloco.preflight.machine import seconds_of_calls
from tests.kit.buckets import FakeBucket, bucket
from tests.kit.ranks import federation_keys, until

SECONDS = 60.0
RUN = 7
RUN_NAME = f"{RUN:016x}"
VISITOR = 4096


class Federation:
    """Members in one folder, and the lines that they were warned with."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self.store, self.keys = store, federation_keys()
        self.lines = list[str]()
        self.meshes = list[Mesh]()

    def join(
        self, slot: int, run: int = RUN, store: Store | None = None, incarnation: int = 0, **status: Any
    ) -> Mesh:
        statuses = Statuses(run, Member(slot, incarnation or time.time_ns()), self.keys.identity(slot))
        carrier = FolderCarrier(store or self.store(), {"model": f"of {run}"})
        mesh = Mesh(statuses, [carrier], self.lines.append if run == RUN else print)
        self.meshes.append(mesh)
        if slot != VISITOR:
            mesh.publish(PeerStatus(**status))
        return mesh

    def of(self, count: int) -> list[Mesh]:
        meshes = [self.join(slot, addresses=[f"host:{slot + 1}"]) for slot in range(count)]
        know_each_other(*meshes)
        return meshes

    def end(self) -> None:
        for mesh in self.meshes:
            mesh.close()
        assert [carrier_of(mesh).failure for mesh in self.meshes] == [None] * len(self.meshes)
        until_threads_end()


def know_each_other(*meshes: Mesh) -> None:
    until(lambda: all(a is b or a.reaches(b.me) for a in meshes for b in meshes))


def until_threads_end() -> None:
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "folder"])


def carrier_of(mesh: Mesh) -> FolderCarrier:
    (carrier,) = mesh.carriers
    assert isinstance(carrier, FolderCarrier)
    return carrier


def result(mesh: Mesh, fetch: Fetch) -> bytes:
    return bytes(mesh.result(fetch, Patience(mesh, fetch.giver, seconds=SECONDS)))


def exchange(a: Mesh, b: Mesh, name: str, blobs: list[bytes]) -> None:
    """Both give and take blobs at once."""

    def one(mesh: Mesh, other: Mesh) -> list[bytes]:
        for number, blob in enumerate(blobs):
            mesh.offer(f"{name}/{number}", blob, to=other.me)
        names = (f"{name}/{number}" for number in range(len(blobs)))
        patience = Patience(mesh, other.me, lambda: mesh.clock() + SECONDS)
        return [bytes(blob) for blob in mesh.fetch_all(names, 4, patience, is_sent=True)]

    futures = [a.spawn(lambda: one(a, b), "a"), b.spawn(lambda: one(b, a), "b")]
    assert [future.result(SECONDS) == blobs for future in futures] == [True, True]
    for mesh in (a, b):
        mesh.offers.withdraw(f"{name}/")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten pauses."""
    seconds = {"_SOON_SECONDS": 0.1, "_BEAT_SECONDS": 0.3, "_AGAIN_SECONDS": 0.3, "_REPEAT_SECONDS": 1.0}
    for name, value in seconds.items():
        module = folder_members if hasattr(folder_members, name) else folder_carrier
        monkeypatch.setattr(module, name, value)
    for name in ("_FOLDER_PACE", "_BUCKET_PACE"):
        monkeypatch.setattr(folder_carrier, name, folder_carrier._Pace(0.01, 0.05, 0.1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def join_here(folder: Path) -> Iterator[Federation]:
    """Sealed, in a local folder."""
    federation = Federation(lambda: Store.of(folder.as_uri()))
    yield federation
    federation.end()


@pytest.fixture
def files() -> FakeBucket:
    return FakeBucket()


@pytest.fixture
def in_bucket(files: FakeBucket) -> Iterator[Federation]:
    """Sealed, in a bucket."""
    federation = Federation(lambda: bucket(files))
    yield federation
    federation.end()


@pytest.fixture(params=["join_here", "in_bucket"])
def federation(request: pytest.FixtureRequest) -> Federation:
    return request.getfixturevalue(request.param)


# Pieces


def test_a_piece_withdrawn_before_it_is_written_is_refused(
    join_here: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last piece of a state, which the taker need not read."""
    monkeypatch.setattr(folder_carrier, "_REPEAT_SECONDS", 1000.0)
    a, b = join_here.of(2)
    asked, tasks = b.begin(a.me, "last"), list[Callable[[], object]]()
    until(lambda: a.offers.takers("last"))
    with monkeypatch.context() as busy:
        busy.setattr(carrier_of(a)._folder, "submit", lambda task, is_bulk=False: tasks.append(task))
        a.offer("last", b"")
        a.offers.withdraw("last")
    for task in tasks:
        task()
    with pytest.raises(RefusedError, match="was withdrawn"):
        result(b, asked)


def test_a_piece_that_was_asked_for_is_written_once(join_here: Federation, folder: Path) -> None:
    a, b = join_here.of(2)
    asked = b.begin(a.me, "asked")
    until(lambda: a.offers.takers("asked"))
    a.offer("asked", b"1", to=b.me)
    assert result(b, asked) == b"1"
    time.sleep(0.3)
    assert not list(folder.rglob("[pq]~*"))


def test_of_a_wish_that_was_answered_nothing_is_kept(join_here: Federation) -> None:
    """A job of many days answers a few in each round."""
    a, b = join_here.of(2)
    asked = [b.begin(a.me, name) for name in ("offered", "withdrawn", "cancelled")]
    until(lambda: len(a.offers.takers("")) == 3)
    a.offer("offered", b"1")
    a.offers.withdraw("withdrawn")
    assert result(b, asked[0]) == b"1"
    b.close()
    until(lambda: not a.offers.takers(""))


# Members


def test_a_killed_member_is_gone_and_so_are_its_files(
    join_here: Federation, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_members, "_LEASE_SECONDS", (1.5, 1.5))
    monkeypatch.setattr(folder_members, "LEFTOVER_SECONDS", 2.0)
    a, b = join_here.of(2)
    killed = carrier_of(b)
    killed._closing.set()
    killed._thread.join()
    assert len(a.members()) == 2
    until(lambda: len(a.members()) == 1)
    later = join_here.join(2)
    know_each_other(a, later)
    assert len(later.members()) == 2, "a sign that does not change is of nobody"
    until(lambda: not list(folder.rglob(f"{b.me}*")))
    killed._folder.finish(time.monotonic() + SECONDS)


def test_nobody_is_lost_while_the_folder_hangs(
    in_bucket: Federation, files: FakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_members, "_LEASE_SECONDS", (2.0, 2.0))
    monkeypatch.setattr(folder_members, "_PAUSE_SECONDS", 0.5)
    a, b = in_bucket.of(2)
    seen = list[int]()
    monkeypatch.setattr(a, "wake", lambda: seen.append(len(a.members())))
    files.is_open.clear()
    time.sleep(3)
    files.is_open.set()
    exchange(a, b, "after", [b"1"])
    assert set(seen) <= {2}


def test_an_earlier_process_sees_a_later_one_at_once(join_here: Federation) -> None:
    """Its clock was ahead."""
    a, b = join_here.of(2)
    assert b.me in join_here.join(1, incarnation=b.me.incarnation - 1).known()
    assert a.reaches(b.me)


def test_a_visitor_sees_members_and_leaves_nothing(join_here: Federation, folder: Path) -> None:
    a, _ = join_here.of(2)
    visitor = join_here.join(VISITOR, incarnation=1)
    until(lambda: len(visitor.members()) == 3)
    visitor.close()
    assert not list(folder.rglob(f"{VISITOR}.*"))
    assert len(a.known()) == 2


def test_nothing_is_left_by_members_that_leave(federation: Federation) -> None:
    a, b = federation.of(2)
    a.offer("never fetched", b"1", to=b.me)
    exchange(a, b, "x", [b"1", bytes(10**5)])
    a.close()
    b.close()
    assert federation.store().names() == []
    assert federation.lines == []


def test_who_leaves_at_once_leaves_others_alone(join_here: Federation, folder: Path) -> None:
    """As a job that is refused at its start, before a sign of any other has changed."""
    (a,) = join_here.of(1)
    until(lambda: list(folder.rglob(f"{a.me}~*")))
    marked = folder / RUN_NAME / "to" / str(a.me) / "mark"
    marked.touch()
    join_here.join(1).close()
    assert marked.exists()


def test_who_follows_a_killed_member_and_leaves_last_removes_all(join_here: Federation) -> None:
    a, b = join_here.of(2)
    killed = carrier_of(b)
    killed._closing.set()
    killed._thread.join()
    again = join_here.join(1)
    know_each_other(a, again)
    a.close()
    again.close()
    assert join_here.store().names() == []
    killed._folder.finish(time.monotonic() + SECONDS)


def test_who_leaves_when_all_is_removed_blames_nobody(join_here: Federation, folder: Path) -> None:
    a, b = join_here.of(2)
    for mesh in (a, b):
        mesh.publish(PeerStatus(phase="left"))
    until(lambda: b.me not in a.members())
    a.close()
    assert not list(folder.rglob("*~*"))
    b.close()
    assert join_here.store().names() == []
    assert join_here.lines == []


def test_a_piece_that_nobody_wants_is_removed(
    join_here: Federation, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_members, "LEFTOVER_SECONDS", 0.5)
    a, b = join_here.of(2)
    a.offer("unwanted", b"1", to=b.me)
    until(lambda: list(folder.rglob("p~*")))
    until(lambda: not list(folder.rglob("p~*")))


# Files of others


def test_no_strange_file_is_opened_or_disturbs(join_here: Federation, folder: Path) -> None:
    """A pipe, a link, a folder and a huge file in the place of a piece: the piece takes the place of most."""
    a, b = join_here.of(2)
    inbox = folder / RUN_NAME / "to" / str(b.me)
    asked = {name: b.begin(a.me, name) for name in ("pipe", "link", "huge", "folder")}
    until(lambda: len(a.offers.takers("")) == 4)
    paths = {watch.fetch.name: inbox / file for file, watch in carrier_of(b)._watches.items()}
    os.mkfifo(paths["pipe"])
    paths["link"].symlink_to("/dev/zero")
    with paths["huge"].open("wb") as file:
        file.truncate(2**40)
    paths["folder"].mkdir()
    until(lambda: len(join_here.lines) >= 3)
    for name, fetch in asked.items():
        a.offer(name, name.encode())
        if name != "folder":
            assert result(b, fetch) == name.encode()
    exchange(a, b, "x", [b"1"])
    assert all(re.match(r"cannot (read|write) /\S+: ", line) for line in join_here.lines)
    assert len(join_here.lines) <= 10


def test_members_find_each_other_among_junk(join_here: Federation, folder: Path) -> None:
    rng = random.Random(0)
    first = join_here.join(0)
    strange = ("notes.txt", "\u202e", "q~", "q~1.1~", "p~" + "0" * 32, "q~0.9~xx", "1.5~1", "a~b~c~d")
    for where, count in (("alive", 2000), (f"to/{first.me}", 200)):
        forms = (f"{rng.randrange(4096)}.{n + 1}~1~1~{rng.randbytes(16).hex()}~" for n in range(count))
        for name in (*forms, *strange):
            (folder / RUN_NAME / where / name).touch()
    second = join_here.join(1)
    know_each_other(first, second)
    exchange(first, second, "x", [b"1", bytes(10**6)])


def test_a_forged_piece_is_ignored_until_the_true_one_comes(join_here: Federation, folder: Path) -> None:
    a, b, c = join_here.of(3)
    inbox = folder / RUN_NAME / "to" / str(b.me)
    a.offer("other", b"other", to=b.me)
    until(lambda: list(inbox.glob("p~" + 32 * "?")))
    (other,) = inbox.glob("p~*")
    content, seal = other.read_bytes(), carrier_of(c)._seal_with(b.me)
    assert seal is not None
    kinds = ("moved", "empty", "of another member")
    asked = {kind: b.begin(a.me, kind) for kind in kinds}
    until(lambda: len(a.offers.takers("")) == len(kinds))
    files = {watch.fetch.name: file for file, watch in carrier_of(b)._watches.items()}
    (inbox / files["moved"]).write_bytes(content)
    (inbox / files["empty"]).touch()
    file = files["of another member"]
    (inbox / file).write_bytes(seal.close(file, b"pforged"))
    for changed in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        other.write_bytes(changed)
        assert result(b, b.begin(a.me, "other")) == b"other"
    time.sleep(0.5)
    assert [fetch.outcome for fetch in asked.values()] == [None] * 3
    for kind, fetch in asked.items():
        a.offer(kind, kind.encode())
        assert result(b, fetch) == kind.encode()
    assert join_here.lines == []


def test_a_folder_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    """Whoever may write in the folder could lead a job to files of its user."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("years")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "to").symlink_to(home)
    store = Store.of(f"file://{tmp_path}/run")
    calls = [
        lambda: store.put("to/thesis", b"x"),
        lambda: store.get("to/thesis", 100),
        lambda: store.remove(["to/thesis"]),
        store.below("to").names,
        store.below("to").below("x").remove_all,
    ]
    for call in calls:
        with pytest.raises(OSError, match="cannot"):
            call()
    assert (home / "thesis").read_text() == "years"
    assert Store.of(f"file://{home}").names() == ["thesis"], "a link that the user names is followed"


def test_a_forged_wish_or_status_is_ignored(join_here: Federation, folder: Path) -> None:
    a, b, c = join_here.of(3)
    carrier, alive = carrier_of(c), folder / RUN_NAME / "alive"
    seal = carrier._seal_with(a.me)
    assert seal is not None
    monster = seal.close(carrier._place_of_wish(a.me, b.me), b"x").hex()
    (folder / RUN_NAME / "to" / str(a.me) / f"q~{b.me}~{monster}").touch()
    known = json.loads(a.statuses.of(1).line) | {"number": 99, "text": '{"phase":"left"}'}
    folder_seal = Seal(carrier._identity.folder_key)
    texts = str(b.me), "999999", "99"
    file = "~".join([*texts, folder_seal.mac("alive", RUN_NAME, *texts), ""])
    (alive / file).write_bytes(folder_seal.close(file, json.dumps(known).encode()))
    time.sleep(3)
    assert carrier_of(a)._members._signs[b.me].number < 99
    assert a.offers.takers("") == []
    assert b.me in a.members()


def test_a_repeated_sign_of_life_brings_nobody_back(join_here: Federation, folder: Path) -> None:
    a, b = join_here.of(2)
    alive = folder / RUN_NAME / "alive"
    copies = {path.name: path.read_bytes() for path in alive.glob(f"{b.me}~*")}
    until(lambda: not {path.name for path in alive.glob(f"{b.me}~*")} & copies.keys())
    b.close()
    until(lambda: not a.reaches(b.me))
    a.statuses._newest.pop(1)  # even if it had never said that it left
    for name, content in copies.items():
        (alive / name).write_bytes(content)
        time.sleep(0.5)
        assert not a.reaches(b.me)


# Trouble


@pytest.mark.parametrize("kind", ["write", "list", "read", "remove"])
def test_a_store_that_fails_for_a_while_is_named_once(
    kind: str, in_bucket: Federation, files: FakeBucket
) -> None:
    a, b = in_bucket.of(2)
    files.fails = frozenset({kind})
    b.offer("x", b"1", to=a.me)
    asked = a.begin(b.me, "x", is_sent=True)
    b.begin(a.me, "not yet")
    until(lambda: in_bucket.lines)
    time.sleep(0.5)
    files.fails = frozenset()
    assert result(a, asked) == b"1"
    exchange(a, b, "later", [b"1", bytes(10**6)])
    verb = "remove files" if kind == "remove" else kind
    lines = {re.sub("(in )?fake:.*: ", "", line) for line in in_bucket.lines}
    assert lines == {f"cannot {verb} No space left on device"}
    assert len(in_bucket.lines) <= 2, "one of each process"


def test_a_folder_that_was_removed_is_made_again(join_here: Federation, folder: Path) -> None:
    a, b = join_here.of(2)
    shutil.rmtree(folder)
    exchange(a, b, "later", [b"1", bytes(10**6)])
    know_each_other(a, b, join_here.join(2))


def test_a_folder_that_cannot_be_used_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    federation = Federation(lambda: Store.of((tmp_path / "file").as_uri()))
    remedy = "; each job must be able to list, read and write there$"
    with pytest.raises(
        UserError, match=rf"^federation.rendezvous: cannot write in /.*/file: File exists{remedy}"
    ):
        federation.join(0)
    files = FakeBucket()
    for kind in ("write", "list"):
        files.fails = frozenset({kind})
        with pytest.raises(
            UserError, match=rf"^federation.rendezvous: cannot {kind} .*fake:.*: No space left"
        ):
            federation.join(0, store=bucket(files))
    until_threads_end()


def test_a_folder_that_hangs_does_not_keep_a_member(
    in_bucket: Federation, files: FakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_carrier, "_LEAVE_SECONDS", 0.3)
    (a,) = in_bucket.of(1)
    files.is_open.clear()
    a.close()
    files.is_open.set()


def test_a_job_that_is_alone_says_why(
    join_here: Federation, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_members, "_ALONE_SECONDS", 0.3)

    def lines_of(count: int = 1) -> list[str]:
        join_here.lines.clear()
        mesh = join_here.join(0)
        until(lambda: len(join_here.lines) >= count)
        mesh.close()
        return join_here.lines[:]

    url = folder.as_uri()
    no_other_job = "no other job has come to {}; if another was started, do both see the same folder?"
    assert lines_of() == [no_other_job.format(f"{url} so far")]
    other = join_here.join(1, run=8)
    assert lines_of() == [
        f"no other job of this run is found, only {url}/0000000000000008 of another run: its job differs from "
        "this one in model, or the folder is old"
    ]
    (folder / f"rank_00001_{'0' * 16}.json").touch()
    (folder / f"{9:016x}").mkdir()
    os.mkfifo(folder / f"{9:016x}" / "digests.json")
    assert "0.4 or earlier" in lines_of(2)[1]
    other.close()
    own, join_here.keys = join_here.keys, Keys.make(tmp_path / "another key")
    join_here.join(1)
    join_here.keys = own
    join_here.join(0)
    until(lambda: any("with another key" in line for line in join_here.lines))


# Requests


def test_a_bucket_has_a_write_and_a_read_for_each_piece(in_bucket: Federation, files: FakeBucket) -> None:
    stores = [bucket(files), bucket(files)]
    a, b = meshes = [in_bucket.join(slot, store=store) for slot, store in enumerate(stores)]
    know_each_other(a, b)
    time.sleep(0.5)
    before = [store.calls.copy() for store in stores]
    beats = [carrier_of(mesh)._members._beat for mesh in meshes]
    exchange(a, b, "x", [bytes(10**6)] * 20)
    for store, earlier, mesh, beat in zip(stores, before, meshes, beats, strict=True):
        made = store.calls - earlier
        assert made["get"] == 20
        assert 20 <= made["put"] <= 20 + carrier_of(mesh)._members._beat - beat + 1


@pytest.mark.parametrize("others", [1, 4])
def test_a_member_at_rest_makes_the_same_few_requests(
    others: int, in_bucket: Federation, files: FakeBucket
) -> None:
    files.delay = 0.0
    store = bucket(files)
    a = in_bucket.join(0, store=store)
    know_each_other(a, *(in_bucket.join(slot + 1) for slot in range(others)))
    time.sleep(0.5)
    before, beat = store.calls.copy(), carrier_of(a)._members._beat
    time.sleep(1.5)
    made = store.calls - before
    assert set(made) <= {"list", "put", "remove"}
    assert abs(made["put"] - (carrier_of(a)._members._beat - beat)) <= 1


def test_a_folder_is_tried_as_it_is_used(tmp_path: Path) -> None:
    for store in (bucket(), Store.of(tmp_path.as_uri())):
        assert list(seconds_of_calls(store)) == ["write", "list", "read", "remove"]
        assert store.names() == []
    files = FakeBucket()
    files.fails = frozenset({"list"})
    with pytest.raises(OSError, match=r"^cannot list in .*: No space left on device$"):
        seconds_of_calls(bucket(files))
    assert not files.store
    for url in ("nonsense://bucket", "file://~nobody-has-this-name/run"):
        with pytest.raises(UserError, match=url.partition(":")[0]):
            Store.of(url)


@pytest.mark.slow
def test_pieces_come_through_a_real_server() -> None:
    """S3 over HTTP: nothing is left, and a bucket that is missing is named."""
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "a", "secret": "b", "endpoint_url": f"http://{host}:{port}"}
    files = s3fs.S3FileSystem(**options, use_listings_cache=False, skip_instance_cache=True)
    files.mkdir("bucket")
    federation = Federation(lambda: bucket(files, "s3://bucket/run"))
    a, b = federation.of(2)
    exchange(a, b, "x", [os.urandom(2**22) for _ in range(5)])
    a.offer("n" * MOST_NAME_CHARACTERS, b"1")
    assert b.fetch(a.me, "n" * MOST_NAME_CHARACTERS, SECONDS) == b"1"
    federation.end()
    assert files.find("bucket") == []
    assert federation.lines == []
    with pytest.raises(UserError, match="s3://other/run"):
        federation.join(3, store=bucket(files, "s3://other/run"))
    server.stop()
