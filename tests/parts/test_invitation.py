"""An invitation is read as it was written; each slot is given away once."""

import json
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco import __version__
from megatron_noloco.errors import UserError
from megatron_noloco.federation.keys import Keys
from megatron_noloco.preflight.invitation import Invitation, invitation_in, reserve, text_of
from tests.kit.ranks import federation_keys

DAY = 86400.0


@pytest.fixture(scope="module")
def made() -> Invitation:
    return Invitation(
        slot=5,
        member_file=federation_keys().member_file(5, time.time() + DAY),
        folder="",
        addresses=["first.example.org:29600", "[2001:db8::1]:29600"],
        config={"training": {"train_iters": 100}, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
        needs=["text", "pretrained"],
        tokenizer="{}",
    )


def refused(text: str) -> str:
    with pytest.raises(UserError, match=r"^join: [^\n]*\Z") as error:
        invitation_in(text)
    assert str(error.value).isprintable()
    return str(error.value)


def test_an_invitation_is_read_as_it_was_written(made: Invitation, tmp_path: Path) -> None:
    found = invitation_in(text_of(made))
    assert found == made
    (path := tmp_path / "member.pem").write_text(found.member_file)
    member = Keys.read(path)
    assert (member.slot, member.can_invite, member._authority) == (5, False, federation_keys()._authority)
    assert member.identity(5).slot == 5


def test_another_version_is_named(made: Invitation) -> None:
    content = json.loads(text_of(made)) | {"megatron_noloco": "9.0\x1b[2J"}
    told = f", this machine has {__version__}; install the same version"
    assert f"the invitation is of megatron_noloco 9.0\\x1b[2J{told}" in refused(json.dumps(content))


@pytest.mark.parametrize(
    "changes",
    [
        {"slot": -1},
        {"slot": 4096},
        {"folder": "tcp://a:1"},
        {"folder": "/shared/run"},
        {"folder": "http://198.51.100.7/x"},
        {"folder": "simplecache::s3://bucket/run"},
        {"folder": "s3://bucket/run::file:///etc"},
        {"folder": "file:///a\x1b[2J"},
        {"addresses": []},
        {"addresses": ["a:1\x1b[2J"]},
        {"addresses": ["a:1\n"]},
        {"addresses": ["a:0"]},
        {"addresses": ["a:65536"]},
        {"addresses": ["tcp://a:1"]},
        {"addresses": ["a:1,b:2"]},
        {"addresses": [f"host-{number}:1" for number in range(17)]},
        {"addresses": "a:1"},
        {"config": []},
        {"needs": ["tokenizer_model"]},
        {"tokenizer": {"../escaped": "{}"}},
        {"tokenizer": "\ud800"},
        {"member_file": "x" * 20_000},
        {"member_file": None},
        {"command": "touch /tmp/x"},
        {"megatron_noloco": 7},
    ],
    ids=lambda changes: str(changes)[:50],
)
def test_a_content_that_is_wrong_is_refused(made: Invitation, changes: dict[str, Any]) -> None:
    content = asdict(made)
    assert invitation_in(json.dumps(content | {"megatron_noloco": __version__})).slot == 5
    content |= {"megatron_noloco": __version__} | changes
    assert "a content that no `megatron-noloco invite` writes" in refused(json.dumps(content))


@pytest.mark.parametrize(
    "text", ["", "noloco-abc", "[" * 60_000, "null", '{"run": 1', "[]", "\0", "PART", "CHANGED"]
)
def test_a_text_that_is_no_invitation_is_refused_with_a_line(text: str, made: Invitation) -> None:
    whole = text_of(made)
    assert invitation_in(f" {whole}\n") == made
    text = {"PART": whole[:-40], "CHANGED": whole[:20] + '"' + whole[20:]}.get(text, text)
    assert "this is no invitation, or a part of it is missing" in refused(text)


def test_a_folder_needs_no_address(made: Invitation) -> None:
    for folder in ("file:///shared/run of \u00e4", "s3://bucket/run"):
        through = replace(made, folder=folder, addresses=[])
        assert invitation_in(text_of(through)) == through


class TestReserve:
    """The record of invitations beside a key file."""

    def test_each_slot_is_given_away_once(self, tmp_path: Path) -> None:
        key, ends = tmp_path / "key", time.time() + DAY
        assert [reserve(key, None, {0, 2}, ends) for _ in range(3)] == [1, 3, 4]
        assert reserve(key, 3, {0, 2}, ends) == 3, "it is asked for"
        rows = [json.loads(line) for line in (tmp_path / "key.invited").read_text().splitlines()]
        assert [row["slot"] for row in rows] == [1, 3, 4, 3]
        assert {row["ends"] for row in rows} == {ends}

    def test_a_slot_is_free_when_its_invitation_has_ended(self, tmp_path: Path) -> None:
        assert reserve(tmp_path / "key", None, (), time.time() - 1) == 0
        assert reserve(tmp_path / "key", None, (), time.time() + DAY) == 0
        assert reserve(tmp_path / "key", None, (), time.time() + DAY) == 1

    def test_commands_at_once_get_slots_of_their_own(self, tmp_path: Path) -> None:
        slots = list[int]()

        def take() -> None:
            for _ in range(20):
                slots.append(reserve(tmp_path / "key", None, (), time.time() + DAY))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(slots) == list(range(80))

    def test_lines_that_were_damaged_are_skipped(self, tmp_path: Path) -> None:
        path = tmp_path / "key.invited"
        path.write_text(
            '{"slot": 0, "ends": 9e9}\n[]\nnull\n\x00\n{"slot": null, "ends": 9e9}\n{"slot": 1, "en'
        )
        assert reserve(tmp_path / "key", None, (), time.time() + DAY) == 1
        assert reserve(tmp_path / "key", None, (), time.time() + DAY) == 2

    def test_all_slots_may_be_taken(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="invite: all 4096 slots are taken; give one away with --slot"):
            reserve(tmp_path / "key", None, range(4096), time.time() + DAY)
