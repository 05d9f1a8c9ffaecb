"""The commands invite and join: what an invitation offers, and what a machine takes, fetches and writes."""

import errno
import io
import itertools
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_noloco.cli.main import main
from megatron_noloco.config import RunConfig, load_config
from megatron_noloco.config.agreed import divided, is_taken
from megatron_noloco.config.optimizer_block import OPTIMIZERS, SCHEDULES
from megatron_noloco.data.auto_tokenizer import build_tokenizer
from megatron_noloco.data.tokenizer import TokenizerChoice
from megatron_noloco.errors import UserError
from megatron_noloco.federation.folder_carrier import FolderCarrier
from megatron_noloco.federation.https_carrier import HttpsCarrier
from megatron_noloco.federation.keys import Identity, Keys
from megatron_noloco.federation.mesh import Member, Mesh
from megatron_noloco.federation.statuses import PeerStatus, Statuses
from megatron_noloco.federation.store import Store
from megatron_noloco.federation.visit import visit
from megatron_noloco.fields import fields_of
from megatron_noloco.job.launcher import STARTS_AGAIN, same_command
from megatron_noloco.job.leaving import INTERRUPTED
from megatron_noloco.preflight import inviting, machine, newcomer
from megatron_noloco.preflight.invitation import Invitation, invitation_in, text_of
from megatron_noloco.preflight.machine import Finding
from megatron_noloco.preflight.newcomer import (
    Local,
    check_local,
    check_member_file,
    join_options,
    offered,
    proposed,
    write_job,
)
from megatron_noloco.training.prepare import _slot, network_for
from tests.kit.golden import check
from tests.kit.hf_folders import make_model, write_folder
from tests.kit.ranks import refusal_of
from tests.kit.tiny import tiny, write_config
from tests.kit.tokenizers import tokenizer_at, write_tokenizer

DAY = 86400.0


def raw(**more: Any) -> dict[str, Any]:
    federation = {"rendezvous": "tcp://10.0.0.1:5000", "key_file": "key"}
    return tiny(more, tiny({"federation": federation, "data": {"text": "python-stdlib"}}))


def invited(keys: Keys, **fields: Any) -> Invitation:
    """Return an invitation to slot 1."""
    defaults: dict[str, Any] = {
        "slot": 1,
        "member_file": keys.member_file(1, time.time() + DAY),
        "folder": "",
        "addresses": ["10.0.0.1:5000"],
        "config": {},
        "needs": [],
        "tokenizer": "",
    }
    return Invitation(**defaults | fields)


def joined(folder: Path, content: dict[str, Any], **local: Any) -> tuple[RunConfig, RunConfig, list[str]]:
    """Return the config of a job with this file, that of a machine that joins it, and what this one must have."""
    keys = Keys.make(folder / "key")
    content["federation"]["key_file"] = str(folder / "key")
    config = RunConfig(**content)
    needs, shared = offered(config)
    tokenizer = build_tokenizer(config.data.tokenizer).kept
    invitation = invited(keys, config=shared, needs=needs, tokenizer=tokenizer)
    here = Local(folder / "joined", **{"data": {}} | local)
    path, _ = write_job(invitation_in(text_of(invitation)), here, lambda line: None)
    return config, load_config(path), needs


class FakeJobs:
    """The jobs that a visit finds."""

    def __init__(self) -> None:
        self.answers: Sequence[str] = ["10.0.0.1:5000"]
        self.statuses: dict[Member, PeerStatus] = {}
        self.present: set[Member] = set()
        self.visitors: list[tuple[int, int]] = []  # slot and run

    def add(self, slot: int, *addresses: str, present: bool = True, **status: Any) -> None:
        member = Member(slot, 5)
        self.statuses[member] = PeerStatus(addresses=[*addresses], **status)
        if present:
            self.present.add(member)

    def visit(
        self, identity: Identity, run: int, addresses: Sequence[str]
    ) -> tuple[Mapping[Member, PeerStatus], set[Member]]:
        self.visitors.append((identity.slot, run))
        if not {*addresses} & {*self.answers}:
            raise UserError("; ".join(f"{address}: nobody answers\x1b[2J" for address in addresses))
        return self.statuses, self.present


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> FakeJobs:
    found = FakeJobs()
    monkeypatch.setattr(inviting, "visit", found.visit)
    return found


class Place:
    """A folder with the config of a federation."""

    def __init__(self, folder: Path, **federation: Any) -> None:
        self.folder, self.key_file = folder, folder / "key"
        self.keys = Keys.make(self.key_file)
        content = raw(training={"output_dir": str(folder / "run")})
        content["federation"] |= {"key_file": str(self.key_file)} | federation
        self.path = str(write_config(folder, content))

    def invite(self, *options: str) -> int:
        return main(["invite", self.path, *options])

    @property
    def run(self) -> int:
        return network_for(load_config(self.path)).run


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


@pytest.mark.parametrize("way", ["file", "stdin"])
def test_two_commands_lead_to_a_config(
    place: Place,
    jobs: FakeJobs,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "check_gpus", lambda: [Finding("GPU", "problem", "broken", "mend it")])
    monkeypatch.setattr(os, "execv", started := Mock())
    jobs.add(0, "10.0.0.1:5000", "[2001:db8::1]:5000")
    jobs.add(2, "10.0.0.2:5000")
    assert place.invite("--valid", "1h") == 0
    printed, hint = capsys.readouterr()
    assert hint.startswith("Copy invitation-1.noloco to the other machine")
    assert hint.count("\n") == 1
    assert printed == "megatron-noloco join invitation-1.noloco\n"
    assert Path("invitation-1.noloco").stat().st_mode & 0o077 == 0
    content = Path("invitation-1.noloco").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main(["join", "invitation-1.noloco" if way == "file" else "-"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "Taken from the invitation: train_micro_batch_size_per_gpu, optimizer (5 fields), scheduler (6 fields), "
        "gradient_clipping, noloco (3 fields), model (7 fields), data (2 fields), training (2 fields), "
        "evaluation (1 field), train_batch_size"
    )
    assert "Fix first: GPU: broken. mend it" in lines, "so it is not started"
    start = "megatron-noloco train joined/config.json"
    assert lines[-1] == f"Not started: first mend the problem above. Then start it with: {start}"
    assert not started.called
    config = load_config("joined/config.json")
    assert config.federation.rendezvous == "tcp://10.0.0.1:5000,10.0.0.2:5000,[2001:db8::1]:5000"
    assert config.training.output_dir == str(place.folder / "joined" / "run")
    member_file = Path(str(config.federation.key_file))
    assert member_file.stat().st_mode & 0o077 == 0
    assert Keys.read(member_file)._authority == place.keys._authority
    assert jobs.visitors == [(4096, place.run)]
    assert _slot(config, None) == 1, "a job that joined needs no --replica"
    with pytest.raises(UserError, match=f"`{start}` starts the job in it; to join anew, remove the folder"):
        check_local([], Local(Path("joined"), {}))


def test_job_that_joined_names_the_command_to_start_it_again(
    place: Place, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that the user gave, `join`, would find its folder there already."""
    monkeypatch.setattr(newcomer, "check_machine", lambda is_separate: [])
    monkeypatch.setattr(os, "execv", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setenv(STARTS_AGAIN, "")  # restored after the test
    jobs.add(0, "10.0.0.1:5000")
    assert place.invite() == 0
    assert main(["join", "invitation-1.noloco", "--folder", "here"]) == INTERRUPTED
    assert same_command(os.environ) == "`megatron-noloco train here/config.json`"


def test_each_invitation_has_a_slot_of_its_own(place: Place, jobs: FakeJobs) -> None:
    jobs.add(1, "10.0.0.1:5000")
    jobs.add(2, "10.0.0.2:5000", present=False)
    jobs.add(4, phase="left", present=False)
    for slot in (3, 5, 6):
        assert place.invite() == 0
        assert Path(f"invitation-{slot}.noloco").exists()
    assert place.invite("--slot", "2", "--file", "again.noloco") == 0
    assert invitation_in(Path("again.noloco").read_text()).slot == 2


INVITE_WRONG = (
    "--slot 1",
    "--slot 4096",
    "--at 10.0.0.9:5000",
    "--file key",
    "--file no/such.noloco",
    "--file /proc/a",
)


def test_an_invitation_that_cannot_be_is_one_line(place: Place, jobs: FakeJobs) -> None:
    """In tests/golden/invite_lines.txt. Then from jobs without ports, and from a machine that was invited."""

    def cases() -> Iterator[tuple[str, str]]:
        jobs.add(1, "10.0.0.1:5000")
        for options in INVITE_WRONG:
            yield options, refusal_of("invite", place.path, *options.split())
        jobs.statuses = {Member(1, 5): PeerStatus()}
        yield "no job has a port", refusal_of("invite", place.path)
        place.key_file.write_text(place.keys.member_file(1, time.time() + DAY))
        yield "the key is a member file", refusal_of("invite", place.path)

    check("invite_lines", cases())
    assert not Path("key.invited").exists(), "no slot is given away"


def test_an_invitation_that_has_ended_is_named(place: Place) -> None:
    def refused(member_file: str) -> str:
        with pytest.raises(UserError, match=r"^join: [^\n]*\Z") as error:
            check_member_file(invited(place.keys, member_file=member_file))
        return str(error.value)

    assert "the invitation was good until 2001-09-09 01:46 UTC; ask" in refused(
        place.keys.member_file(1, 1e9)
    )
    assert "is the member file of replica 2" in refused(place.keys.member_file(2, time.time() + DAY))
    assert "the invitation holds no key" in refused("-----BEGIN PRIVATE KEY-----")


def test_jobs_that_share_a_folder_invite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether or not a job runs. The slots of a running job and of the first machine are not given away."""
    monkeypatch.setattr(inviting, "_LOOK_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    shared = f"file://{tmp_path}/our run"
    place = Place(tmp_path, rendezvous=shared, listen="off")
    assert place.invite() == 0
    monkeypatch.setattr(inviting, "_LOOK_SECONDS", 5.0)
    network = network_for(load_config(place.path))
    statuses = Statuses(network.run, Member(1, time.time_ns()), place.keys.identity(1))
    mesh = Mesh(statuses, [FolderCarrier(Store.of(shared), network.digests)], print)
    try:
        mesh.publish(PeerStatus(addresses=["10.0.0.1:5000"]))
        assert place.invite("--slot", "1") == 2
        assert "replica 1 is running: stop it first" in capsys.readouterr().err
        assert place.invite("--at", "10.0.0.1:5000") == 2
        assert "--at: the jobs of this federation meet in a folder; leave it out" in capsys.readouterr().err
        assert place.invite() == 0
        assert Store.of(f"{shared}/{network.run:016x}/to").names() == [str(mesh.me)], "nothing is left over"
    finally:
        mesh.close()
    first, second = (invitation_in(Path(f"invitation-{slot}.noloco").read_text()) for slot in (1, 2))
    assert (first.folder, first.addresses) == (shared, [])
    assert second.addresses == ["10.0.0.1:5000"]
    Path("invitation-1.noloco").rename("first.noloco")
    capsys.readouterr()
    assert main(["join", "first.noloco", "--listen", "off", "--no-start"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"The jobs meet in {shared}, which is the same folder on each machine" in lines
    config = load_config("joined/config.json")
    assert (config.federation.rendezvous, config.federation.listen) == (shared, "off")


@contextmanager
def running(place: Place, slot: int, seeds: Sequence[str] = ()) -> Iterator[str]:
    """Run a job over HTTPS as others see it; give its address."""
    network, listener = network_for(load_config(place.path)), socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    identity = place.keys.identity(slot)
    statuses = Statuses(network.run, Member(slot, time.time_ns()), identity)
    mesh = Mesh(statuses, [HttpsCarrier(network.digests, listener, seeds)], print)
    try:
        mesh.publish(PeerStatus(addresses=[address]))
        assert mesh.wait(lambda: len(mesh.members()) > len(seeds), mesh.clock() + 60)
        yield address
    finally:
        mesh.close()
        listener.close()


def test_a_newcomer_comes_to_jobs_that_run(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = write_tokenizer(place.folder / "tokenizer")
    content = json.loads(Path(place.path).read_text())
    content["data"] |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer)}
    Path(place.path).write_text(json.dumps(content))
    with running(place, 0) as first, running(place, 2, [first]) as second:
        assert place.invite("--at", first, "--slot", "2") == 2
        assert "replica 2 is running: stop it first" in capsys.readouterr().err
        assert place.invite("--at", second) == 0
        assert main(["join", "invitation-1.noloco", "--no-start"]) == 0
        config = load_config("joined/config.json")
        assert str(config.federation.rendezvous) == f"tcp://{second},{first}"
        assert build_tokenizer(config.data.tokenizer).digest == tokenizer_at(tokenizer).digest
        assert len(visit(Keys.read(Path("joined/member.pem")).identity(1), place.run, [first])[1]) == 2
    capsys.readouterr()
    assert place.invite("--at", first) == 2
    assert f"invite: no job answers (nobody answers at {first}: " in capsys.readouterr().err


def test_a_new_key_ends_all_invitations(place: Place) -> None:
    with running(place, 0) as address:
        assert place.invite("--at", address) == 0
    invitation = invitation_in(Path("invitation-1.noloco").read_text())
    Path("member.pem").write_text(invitation.member_file)
    place.key_file.rename("old-key")
    place.keys = Keys.make(place.key_file)
    with (
        running(place, 0) as address,
        pytest.raises(UserError, match=f"the process at {address} is another program, has another key"),
    ):
        visit(Keys.read(Path("member.pem")).identity(1), place.run, [address])


@pytest.mark.parametrize("pasted", [b"\xff\xfe{", b""])
def test_what_is_pasted_may_be_anything(
    pasted: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pasted), encoding="utf-8"))
    assert main(["join", "-"]) == 2
    assert capsys.readouterr().err.startswith("join: this is no invitation, or a part of it is missing")


def test_a_mark_of_an_editor_before_an_invitation_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invitation = invited(Keys.make(tmp_path / "key"), needs=["text"])
    (tmp_path / "marked").write_text(text_of(invitation), encoding="utf-8-sig")
    assert main(["join", str(tmp_path / "marked")]) == 2
    assert capsys.readouterr().err.startswith("join: --data is missing")


def test_a_join_that_fails_can_be_repeated(tmp_path: Path) -> None:
    keys = Keys.make(tmp_path / "key")
    local, wrong = Local(tmp_path / "joined", {"": str(tmp_path)}), deepcopy(raw())
    wrong["model"]["num_layers"] = 0
    tokenizer = build_tokenizer(TokenizerChoice(str(write_tokenizer(tmp_path / "tokenizer")))).kept
    for config in (wrong, raw()):
        check_local(["text"], local)
        invitation = invited(keys, config=config, needs=["text"], tokenizer=tokenizer)
        with pytest.raises(UserError, match=r"join: model\.num_layers") if config is wrong else nullcontext():
            write_job(invitation, local, lambda line: None)
    assert (tmp_path / "joined" / "config.json").exists()


def test_weights_of_another_model_leave_no_job_behind(tmp_path: Path) -> None:
    """The job would refuse them at its start, and its folder the next `join`."""
    model = write_folder(tmp_path / "model", make_model())
    local = Local(tmp_path / "joined", {"": str(tmp_path)}, str(model))
    invitation = invited(Keys.make(tmp_path / "key"), config=raw(), needs=["text", "pretrained"])
    check_local(invitation.needs, local)
    line = r"^join: training\.pretrained: model\.num_layers is \d+, but 2 in .*model/config\.json\n"
    with pytest.raises(UserError, match=line):
        write_job(invitation, local, lambda line: None)
    assert not list((tmp_path / "joined").iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invitation = invited(Keys.make(tmp_path / "key"), config=raw())
    behind_file = Local(tmp_path / "key" / "joined", {})
    check_local([], behind_file)
    with pytest.raises(
        UserError, match=r"key/joined: cannot be written: Not a directory; give another --folder"
    ):
        write_job(invitation, behind_file, lambda line: None)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(newcomer, "write_text", Mock(side_effect=full))
    with pytest.raises(UserError, match=r"joined: cannot be written: No space left on device"):
        write_job(invitation, Local(tmp_path / "joined", {}), lambda line: None)
    assert not list((tmp_path / "joined").iterdir())


def test_what_is_a_machine_s_own_is_asked_of_it(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "theirs")
    data = {
        "text": "/their/text", "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer),
    }  # fmt: skip
    (mine := tmp_path / "mine").mkdir()
    _, config, needs = joined(tmp_path, raw(data=data), data={"": str(mine)})
    assert needs == ["text"]
    with pytest.raises(ValueError, match=r"--data is missing: what this machine reads \(data.text\)"):
        check_local(needs, Local(tmp_path / "other", {}))
    assert "/their" not in json.dumps(config.to_dict())
    assert config.data.text == str(mine)
    assert build_tokenizer(config.data.tokenizer).digest == tokenizer_at(tokenizer).digest


def test_the_command_that_is_printed_has_what_a_newcomer_needs(
    place: Place, jobs: FakeJobs, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(Path(place.path).read_text())
    content["data"]["text"] = str(place.folder / "my texts")
    Path(place.path).write_text(json.dumps(content))
    jobs.add(0, "10.0.0.1:5000")
    (place.folder / "my texts").mkdir()
    (place.folder / "my texts" / "a.txt").write_text("Hello.")
    assert place.invite() == 0
    printed, hint = capsys.readouterr()
    assert "The paths are those of this machine: give those of the other." in hint
    (command,) = printed.splitlines()
    assert command == "megatron-noloco join invitation-1.noloco --data 'my texts'"
    assert main(["join", *shlex.split(command)[2:], "--no-start"]) == 0


def test_the_options_of_a_newcomer_name_fields_and_weights(tmp_path: Path) -> None:
    data = {"text": None, "split": None, "train_data_path": "a", "valid_data_path": ["b", "c"]}
    config = RunConfig(**raw(data=data, training={"pretrained": "/there"}))
    needs, _ = offered(config)
    expected = "--data a --data valid_data_path=PATH --pretrained /there"
    assert join_options(config, needs) == expected.split()


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("recipe", ["paper", None])
def test_a_newcomer_has_the_run_s_settings(tmp_path: Path, dp: int, recipe: str | None) -> None:
    """All that jobs share is as the job that invites has it, and the batch is whole, whatever its layout."""
    more: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    if recipe:
        more["noloco"] = {"recipe": recipe}
    theirs, own, _ = joined(tmp_path, raw(parallel={"data_parallel_size": dp}, **more))
    assert (own.replica_batch, own.micro_batch_size) == (6 * dp, 2)
    batch = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    shared = [divided(config.to_dict())[0] for config in (theirs, own)]
    assert shared[0] == {**shared[1], **{name: shared[0][name] for name in batch}}


# Each machine has these of its own. A new field is here, or among those that an inviter chooses: then think of
# what a hostile one would choose.
OWN_OF_BLOCK = {
    "checkpoint": "async_save keep_last load",
    "data": "cache data_path sft_data_path text tokenizer_model train_data_path valid_data_path",
    "evaluation": "mean_model",
    "federation": "advertise key_file leave_seconds listen rendezvous site",
    "noloco": "enabled most_waiting routing sites transport",
    "parallel": "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split data_parallel_size "
    "expert_model_parallel_size num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
    "pipeline_model_parallel_size replicas sequence_parallel tensor_model_parallel_size "
    "virtual_pipeline_model_parallel_size",
    "tensorboard": "enabled",
    "training": "exit_duration_minutes output_dir peak_tflops pretrained",
    "wandb": "enabled group project team",
}
OWN = [f"{block}.{name}" for block, names in OWN_OF_BLOCK.items() for name in names.split()]
HARMFUL = (
    "/root/.ssh/id",
    "../../etc",
    "$(touch /tmp/x); rm -rf ~",
    "http://198.51.100.7/x",
    "\x1b[2J\nready",
)


def schema() -> set[str]:
    """The dotted names of all fields of a config, the params of each optimizer and schedule among them."""
    blocks: dict[str, Any] = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULES}
    params = {
        f"{block}.params.{name}" for block, kinds in blocks.items() for kind in kinds.values()
        for name in kind.model_fields
    }  # fmt: skip
    types = {f"{block}.type" for block in blocks}
    return {name for name, _ in fields_of(RunConfig)} - blocks.keys() | types | params


def changed(config: dict[str, Any], name: str, value: Any) -> None:
    *blocks, last = name.split(".")
    for block in blocks:
        config = config.setdefault(block, {})
    config[last] = value


def test_each_field_is_offered_or_own() -> None:
    assert {name for name in schema() if not is_taken((*name.split("."),))} == {*OWN}
    assert not any(is_taken((name,)) for name in (*RunConfig.model_fields, "hooks") if name not in schema())


@pytest.fixture
def from_inviter(tmp_path: Path) -> Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]]:
    """Writes a job from a config that was sent; returns the config that is there then, and what is told."""
    keys, numbers = Keys.make(tmp_path / "key"), itertools.count()

    def written(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        told, local = list[str](), Local(tmp_path / f"joined_{next(numbers)}", {"text": str(tmp_path)})
        path, _ = write_job(invited(keys, config=config), local, told.append)
        return json.loads(path.read_text()), told

    return written


@pytest.mark.parametrize("harm", HARMFUL)
def test_a_hostile_inviter_chooses_nothing_beyond_the_list(
    from_inviter: Callable[..., tuple[dict[str, Any], list[str]]], harm: str
) -> None:
    """Each other field is set at once, and so are fields that no config has."""
    invented = {
        "federation.notice_command": harm,
        "hooks": {"start": harm},
        harm: harm,
        "model": {harm: [harm]},
    }
    sent = deepcopy(raw())
    honest, _ = from_inviter(sent)
    for name in (*OWN, *invented):
        changed(sent, name, invented.get(name, harm))
    sent["model"] |= raw()["model"]
    sent["wandb"]["enabled"] = True
    found, told = from_inviter(sent)
    assert [told[1].startswith("Left out, since each machine has its own: "), len(told)] == [True, 2]
    assert all(line.isascii() and line.isprintable() for line in told)
    own = str(Path(found["federation"]["key_file"]).parent)
    assert json.dumps(found).replace(own, "") == json.dumps(honest).replace(own[:-1] + "0", "")
    assert harm not in str(found)


@pytest.mark.parametrize("name", sorted(name for name in schema() if is_taken((*name.split("."),))))
def test_no_field_that_an_inviter_chooses_takes_free_text(
    from_inviter: Callable[..., tuple[dict[str, Any], list[str]]], name: str
) -> None:
    for harm in HARMFUL:
        sent = deepcopy(raw())
        changed(sent, name, harm)
        with pytest.raises(ValueError, match=r"^join: ") as refused:
            from_inviter(sent)
        assert all(line.isascii() and line.isprintable() for line in str(refused.value).split("\n"))


JOIN_WRONG: list[dict[str, Any]] = [
    {"data": {"txt": "/tmp"}},
    {"data": {"": "/no/such"}},
    {"data": {"sft_data_path": "/no/such"}},
    {"listen": "foo"},
    {"pretrained": "/no/such"},
    {"folder": Path("file")},
    {"folder": Path("full")},
]


def test_a_mistake_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tests/golden/join_lines.txt."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("full", "folder").mkdir(parents=True)
    local = Local(tmp_path / "joined", {"": str(tmp_path)})
    check_local(["text"], local)

    def said_of(changes: dict[str, Any]) -> str:
        with pytest.raises(ValueError) as caught:
            check_local(["text"], local._replace(**changes))
        return str(caught.value)

    check("join_lines", ((str(changes), said_of(changes)) for changes in JOIN_WRONG))


def test_the_batch_stays_whatever_layout_is_proposed() -> None:
    base = raw(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)
    little, much = 1_000, 80 * 10**9
    expected = {
        (): (1, 1, 1),
        (much,): (1, 1, 1),
        (much,) * 2: (1, 1, 1),  # two do not divide three microbatches
        (much,) * 4: (3, 1, 3),
        (little,) * 4: (2, 2, 1),  # which does not fit either
    }
    for gpus, (ranks, tp, dp) in expected.items():
        config, count = proposed(RunConfig(**base), gpus)
        assert count == ranks, gpus
        assert config.replica_batch == 6
        assert config.parallel.tensor_model_parallel_size == tp, gpus
        assert config.parallel.data_parallel_size == dp, gpus


def test_tensor_parallelism_is_proposed_for_mixtures_too() -> None:
    mixture = raw(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    mixture["model"] = {**mixture["model"], "family": "mixtral"}
    config, ranks = proposed(RunConfig(**mixture), [1_000] * 2)
    assert (ranks, config.parallel.tensor_model_parallel_size) == (2, 2)
    assert config.parallel.sequence_parallel
