"""Which checkpoint of another job a rank takes over, what it refuses of it, and what it leaves on disk."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_noloco.checkpoint import catalog, resume
from megatron_noloco.checkpoint.catalog import DamagedCheckpointError, Manifest
from megatron_noloco.checkpoint.offer import check_offer, newest_saved, receive
from megatron_noloco.checkpoint.resume import Start, find_start
from megatron_noloco.checkpoint.run_settings import CheckpointSettings
from megatron_noloco.config import RunConfig
from megatron_noloco.federation.handover import Handover
from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.plans.topology import Position
from megatron_noloco.training import checkpoint_takeover
from megatron_noloco.training.checkpoint_takeover import SavedState, take_over_checkpoint
from tests.unit.federated import SECONDS, connected, until
from tests.unit.test_checkpoint_files import CONFIG, job, write_checkpoint

GIVER, TAKER = replace(job(2), pp=2), replace(job(5), pp=2)
AT = Position(2, 1, 0, 0)  # the giver's rank
ARCHITECTURE = RunConfig.from_dict(CONFIG).architecture(257)
RUN = RunConfig.from_dict({**CONFIG, "data": {"text": "elsewhere"}}).to_dict()
SETTINGS = CheckpointSettings(Path("checkpoints"), RUN, dict, keep_last=2, async_save=False, load="auto")


def offered(folder: Path) -> tuple[bytes, list[Path]]:
    write_checkpoint(folder, 10, GIVER)
    write_checkpoint(folder, 20, GIVER)
    return contents_of(folder, AT)


def contents_of(folder: Path, at: Position) -> tuple[bytes, list[Path]]:
    """The newest manifest of a rank, and its files."""
    found = newest_saved(folder, at)
    assert found is not None
    return found[1].read_bytes(), [found[1].parent / name for name in sorted(found[0].files)]


def accept(content: bytes) -> Manifest:
    return check_offer(content, AT, TAKER, ARCHITECTURE, SETTINGS)


def copy_of(files: Sequence[Path]) -> Callable[[Sequence[Tensor]], None]:
    """Fills buffers as a handover does."""

    def fill(buffers: Sequence[Tensor]) -> None:
        for buffer, path in zip(buffers, files, strict=True):
            buffer.copy_(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))

    return fill


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_newest_step_that_the_rank_has_saved_is_given(tmp_path: Path) -> None:
    assert newest_saved(tmp_path / "nowhere", AT) is None
    content, files = offered(tmp_path)
    assert Manifest.parse(content, "").step == 20
    assert [path.name for path in files] == list(FILES)
    assert newest_saved(tmp_path, replace(AT, replica=3)) is None, "of another replica"
    damaged = catalog.replica_folder(catalog.step_folder(tmp_path, 20), 2) / catalog.manifest_name(AT)
    damaged.write_text("{")
    assert Manifest.parse(contents_of(tmp_path, AT)[0], "").step == 10
    snapshot = SavedState(tmp_path, AT).read()
    assert snapshot is not None
    assert [part.tobytes() for part in snapshot.parts] == [
        path.read_bytes() for path in contents_of(tmp_path, AT)[1]
    ]


def test_what_is_taken_over_is_a_checkpoint_of_the_other_replica(tmp_path: Path) -> None:
    """With the data and the addresses of this job, which are its own."""
    for stage in range(2):
        at = replace(AT, stage=stage)
        write_checkpoint(tmp_path / "theirs", 20, GIVER)
        content, files = contents_of(tmp_path / "theirs", at)
        manifest = check_offer(content, at, TAKER, ARCHITECTURE, SETTINGS)
        receive(tmp_path / "ours", manifest, copy_of(files))
    found, expected = (catalog.step_folder(tmp_path / name, 20) for name in ("ours", "theirs"))
    assert names_in(tmp_path / "ours") == names_in(found.parent)
    assert catalog.is_complete(found)
    assert names_in(found) == names_in(expected)
    for path in expected.rglob("*.safetensors"):
        assert (found / path.relative_to(expected)).read_bytes() == path.read_bytes()
    start = Start(found, [], catalog.read_manifests(found))
    assert (start.step, start.sample) == (20, 12 * 20)
    assert start.manifests[0].config["data"] == RUN["data"]
    assert start.manifests[0].config["model"] == Manifest.parse(content, "").config["model"]


FILES = ("resume_stage_01_dp_00_tp_00.safetensors", "stage_01_dp_00_tp_00.safetensors")


def of_sizes(first: int, second: int) -> dict[str, Any]:
    return {name: {"bytes": size, "sha256": "0"} for name, size in zip(FILES, (first, second), strict=True)}


WRONG: dict[str, dict[str, Any]] = {
    "a place on this machine": {"files": {"../../../evil": {"bytes": 5, "sha256": "0"}}},
    "no files": {"files": {}},
    "a huge file": {"files": of_sizes(10**15, 5)},
    "an empty file": {"files": of_sizes(0, 5)},
    "another rank": {"position": {"replica": 2, "stage": 0, "dp": 0, "tp": 0}},
    "another replica": {"position": {"replica": 3, "stage": 1, "dp": 0, "tp": 0}},
    "another layout": {"topology": {"pp": 2, "tp": 2, "slot": 2, "slots": 8}},
    "a step that is no number": {"step": "20"},
    "a negative step": {"step": -1},
    "samples that are no number": {"consumed_samples": [1]},
    "counters that are no numbers": {"counters": {"total/sent_bytes": "x"}},
    "another format": {"format": 99},
    "another precision": {"config": RUN | {"bf16": {"enabled": True}}},
    "a config that is none": {"config": []},
    "counters that are none": {"counters": [1]},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_manifest_that_such_a_rank_would_not_have_is_refused(name: str, tmp_path: Path) -> None:
    content, _ = offered(tmp_path)
    with pytest.raises(DamagedCheckpointError, match=r"^offered by replica 2: "):
        accept(json.dumps(json.loads(content) | WRONG[name]).encode())


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[" * 100_000, b"[]", b"{}", b'{"format": 3}'])
def test_content_that_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        Manifest.parse(content, "")


def test_another_model_is_refused(tmp_path: Path) -> None:
    content, _ = offered(tmp_path)
    other = replace(ARCHITECTURE, num_layers=3)
    with pytest.raises(DamagedCheckpointError, match="its rank, layout or model is another"):
        check_offer(content, AT, TAKER, other, SETTINGS)


def test_bytes_with_another_checksum_leave_nothing(tmp_path: Path) -> None:
    content, files = offered(tmp_path / "theirs")

    def altered(buffers: Sequence[Tensor]) -> None:
        copy_of(files)(buffers)
        buffers[1][-1] ^= 1

    with pytest.raises(DamagedCheckpointError, match="checksum does not match"):
        receive(tmp_path / "ours", accept(content), altered)
    assert [name for name in names_in(tmp_path / "ours") if "." in name] == []


def test_a_disk_without_room_is_noticed_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, _ = offered(tmp_path / "theirs")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        receive(tmp_path / "ours", accept(content), lambda buffers: pytest.fail("fetched"))


def test_the_next_takeover_removes_what_a_killed_job_left(tmp_path: Path) -> None:
    """Also where the next one takes over from another replica."""
    content, files = offered(tmp_path / "theirs")
    arguments = (tmp_path / "ours", accept(content), lambda _: os.kill(os.getpid(), signal.SIGKILL))
    killed = multiprocessing.get_context("fork").Process(target=receive, args=arguments)
    killed.start()
    killed.join()
    left = [path for path in (tmp_path / "ours").rglob("*") if path.suffix == ".safetensors"]
    assert len(left) == len(files)
    other = replace(accept(content), position=replace(AT, replica=3))
    receive(tmp_path / "ours", other, copy_of(files))
    assert not any(path.exists() for path in left)


# Over the transport; every job is one rank


def start_of(own: FederationTransport, folder: Path, margin: int = 5, load: str = "auto") -> list[str]:
    """What the start of a job reports; from then on it offers its own checkpoints."""
    settings, handover = replace(SETTINGS, folder=folder, load=load), Handover(own)
    handover.saved = SavedState(folder, Position(own.rank, 0, 0, 0))
    found = find_start(settings, job(own.rank))
    return take_over_checkpoint(handover, settings, job(own.rank), ARCHITECTURE, found, margin, SECONDS).notes


def damage(folder: Path, step: int, slot: int) -> Path:
    weights = catalog.file_of(catalog.step_folder(folder, step), Position(slot, 0, 0, 0), catalog.WEIGHTS)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return weights


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1, barrier=lambda: None)
    monkeypatch.setattr(checkpoint_takeover, "dist", one)
    monkeypatch.setattr(resume, "dist", one)


@pytest.mark.usefixtures("alone")
def test_the_newest_is_taken_over_and_where_it_is_damaged_the_next(tmp_path: Path) -> None:
    folders = [tmp_path / str(slot) for slot in range(4)]
    for slot, step in enumerate((30, 20, 10)):
        write_checkpoint(folders[slot], step, job(slot))
    with connected(tmp_path / "there", 4, slots=8) as ranks:
        for slot in range(3):
            assert start_of(ranks[slot], folders[slot], margin=100) == []
        damage(folders[0], 30, slot=0)
        damaged, taken = start_of(ranks[3], folders[3])
        assert damaged.startswith("the state of replica 0 was not taken over: ")
        assert damaged.endswith("checksum does not match its manifest")
        assert taken.startswith("taken over from replica 1: its state after local step 20, ")
        assert [path.name for path in catalog.steps(folders[3])] == ["step_00000020"]
        assert catalog.is_complete(catalog.step_folder(folders[3], 20))
        assert (folders[3] / "latest").read_text() == "step_00000020\n"
        assert start_of(ranks[3], folders[3], margin=10) == [], "30 is not more than 10 ahead"


@pytest.mark.usefixtures("alone")
def test_an_own_checkpoint_that_is_damaged_does_not_count(tmp_path: Path) -> None:
    """Whether the other's is of a later step, or of the same."""
    for step in (20, 22):
        folders = [tmp_path / f"{slot}_{step}" for slot in range(2)]
        write_checkpoint(folders[0], 22, job(0))
        for own in (10, step):
            write_checkpoint(folders[1], own, job(1))
        damaged = damage(folders[1], step, slot=1)
        with connected(tmp_path / f"there_{step}", 2, slots=8) as (giver, taker):
            start_of(giver, folders[0])
            not_used, *_, taken = start_of(taker, folders[1])
        assert not_used == f"not used: {damaged}: checksum does not match its manifest"
        assert taken.startswith("taken over from replica 0: its state after local step 22, ")
        assert taken.endswith(
            "; this job's own checkpoint was of step 10, and the samples between are not read"
        )


@pytest.mark.usefixtures("alone")
def test_a_save_that_was_never_completed_is_out_of_the_way(tmp_path: Path) -> None:
    """The report names the step of the own checkpoint, and the samples that are not read."""
    folders = [tmp_path / str(slot) for slot in range(2)]
    write_checkpoint(folders[0], 20, job(0))
    write_checkpoint(folders[1], 4, job(1))
    unfinished = catalog.replica_folder(catalog.step_folder(folders[1], 20), 1)
    unfinished.mkdir(parents=True)
    (unfinished / "file").write_text("of a save that was cut short")
    with connected(tmp_path / "there", 2, slots=8) as (giver, taker):
        assert start_of(giver, folders[0]) == []
        assert start_of(taker, folders[1], load="none") == [], "the config says where to start"
        not_used, aside, taken = start_of(taker, folders[1])
    assert not_used == f"not used: {unfinished.parent}: no manifest; it was never completed"
    assert aside == f"set aside: {unfinished.parent} is now step_00000020.set_aside"
    assert taken.endswith("; this job's own checkpoint was of step 4, and the samples between are not read")
    assert names_in(catalog.step_folder(folders[1], 20)) == names_in(catalog.step_folder(folders[0], 20))
    assert (folders[1] / "step_00000020.set_aside" / "replica_01" / "file").exists()


@pytest.mark.usefixtures("alone")
def test_a_giver_that_was_started_anew_takes_no_checkpoint_from_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trained at step 50 when it was asked, and then continued from its checkpoint of step 20."""
    folders = [tmp_path / str(slot) for slot in range(2)]
    write_checkpoint(folders[0], 20, job(0))
    for step in (20, 40):
        write_checkpoint(folders[1], step, job(1))
    before = names_in(folders[1])
    with connected(tmp_path / "there", 2, slots=8) as (giver, taker):
        assert start_of(giver, folders[0]) == []
        steps = iter([{0: 50}, {0: 20}])
        monkeypatch.setattr(Handover, "steps", lambda _: next(steps))
        (line,) = start_of(taker, folders[1])
    assert line.endswith("not taken over: it is at local step 20 by now, as it was started anew")
    assert names_in(folders[1]) == before


@pytest.mark.usefixtures("alone")
def test_a_giver_whose_connection_is_lost_meanwhile_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / str(slot) for slot in range(2)]
    write_checkpoint(folders[0], 20, job(0))
    with connected(tmp_path / "there", 2, slots=8) as (giver, taker):
        protocol, tries = taker.service.protocol, list[int]()

        def receive_later(*arguments: Any) -> None:
            tries.append(len(taker.present()))
            if len(tries) == 1:
                taker.service.do(protocol.lost, protocol.counterparts[giver.rank], "has gone")
                until(lambda: not taker.present())
            receive(*arguments)

        monkeypatch.setattr(checkpoint_takeover, "receive", receive_later)
        assert start_of(giver, folders[0]) == []
        (line,) = start_of(taker, folders[1])
    assert tries == [1, 1]
    assert line.startswith("taken over from replica 0: its state after local step 20, ")
    assert catalog.is_complete(catalog.step_folder(folders[1], 20))
