"""An invitation is read as it was written, and from a mail; each slot is given away once."""

import base64
import json
import random
import re
import string
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco import __version__
from megatron_noloco.errors import UserError
from megatron_noloco.federation.keys import Keys
from megatron_noloco.preflight import invitation
from megatron_noloco.preflight.invitation import (
    LONGEST_LINE,
    Invitation,
    file_of,
    invitation_in,
    line_of,
    reserve,
)

DAY = 86400.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys.make(tmp_path_factory.mktemp("keys") / "key")


@pytest.fixture(scope="module")
def made(keys: Keys) -> Invitation:
    return Invitation(
        run=2**62 + 1,
        slot=5,
        member_file=keys.member_file(5, time.time() + DAY),
        folder="",
        addresses=["first.example.org:29600", "[2001:db8::1]:29600"],
        config={"training": {"train_iters": 100}, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
        needs=["text", "pretrained"],
        tokenizer="0f" * 16,
    )


def refused(text: str) -> str:
    with pytest.raises(UserError, match=r"^join: [^\n]*\Z") as error:
        invitation_in(text)
    assert str(error.value).isprintable()
    return str(error.value)


def test_an_invitation_is_read_as_it_was_written(made: Invitation, keys: Keys, tmp_path: Path) -> None:
    line = line_of(made)
    assert re.fullmatch(r"noloco-[\w-]+", line, re.ASCII)
    assert len(line) <= LONGEST_LINE
    for text in (line, file_of(line, 5, "2027-01-01 00:00 UTC")):
        assert invitation_in(text) == made
    (path := tmp_path / "member.pem").write_text(invitation_in(line).member_file)
    member = Keys.read(path)
    assert (member.slot, member.can_invite, member._authority) == (5, False, keys._authority)
    assert member.identity(5).slot == 5


def test_no_text_but_the_one_that_was_written_is_taken(made: Invitation) -> None:
    line, draw = line_of(made), random.Random(1)
    mutants = {line[:cut] for cut in range(0, len(line), 29)} | {line + "=", line + "A", line.lower(), ""}
    while len(mutants) < 300:
        place = draw.randrange(len(line))
        mutants.add(line[:place] + draw.choice(string.printable) + line[place + draw.randrange(2) :])
    changed = {mutant for mutant in mutants if re.sub("[^a-zA-Z0-9_-]", "", mutant) != line}
    assert len(changed) > 200
    for mutant in changed:
        assert re.match("join: (this is no|a part of the) invitation", refused(mutant))
    for mutant in mutants - changed:  # with a space or a sign more
        with suppress(ValueError):
            assert invitation_in(mutant) == made


@pytest.mark.parametrize(
    "mail",
    [
        "megatron-noloco join {line}\n",
        "megatron-noloco join invitation-5.noloco\nmegatron-noloco join {line}\n",
        "(.venv) me@host:~$ megatron-noloco join '{line}' --no-start\n",
        "Hello,\n\nhere it is:\n\n{wrapped}\n\nBest regards,\nA.\n",
        "On Friday A. wrote:\n> Paste this:\n> {quoted}\n>\n> Best regards\n",
        ">> {twice}\r\n",
        "\u201c{line}\u201d",
        "<{line}>.",
        "{soft}\n",
    ],
)
def test_an_invitation_is_found_in_a_mail(made: Invitation, mail: str) -> None:
    line = line_of(made)
    pieces = [line[at : at + 70] for at in range(0, len(line), 70)]
    text = mail.format(
        line=line, wrapped="\n".join(pieces), quoted="\n> ".join(pieces), twice="\r\n>> ".join(pieces),
        soft="=\n".join(pieces),
    )  # fmt: skip
    assert invitation_in(text) == made
    assert "a part of the invitation is missing or changed: copy all" in refused(text.replace(pieces[-1], ""))
    assert 'this is no invitation, which begins with "noloco-"' in refused(text.replace("noloco-", ""))


def packed(content: bytes) -> str:
    """Return a line with a sound checksum."""
    return "noloco-" + base64.urlsafe_b64encode(content + invitation._check(content)).decode().rstrip("=")


def test_another_version_is_named(made: Invitation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invitation, "__version__", "9.0\x1b[2J")
    later = line_of(made)
    monkeypatch.undo()
    told = f", this machine has {__version__}; install the same version"
    assert f"the invitation is of megatron_noloco 9.0\\x1b[2J{told}" in refused(later)
    earlier = packed(b'["0.3.9","tcp://first:29600","0f0f","a1a1"]')
    assert f"the invitation is of megatron_noloco 0.3.9{told}" in refused(earlier)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": -1},
        {"run": 2**63},
        {"run": "1"},
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
        {"tokenizer": "../../etc/passwd"},
        {"tokenizer": "0f" * 16 + "\n"},
        {"member_file": [["PRIVATE KEY", "all"]]},
        {"member_file": [["PRIVATE KEY", 20_000]]},
        {"member_file": None},
        {"command": "touch /tmp/x"},
    ],
    ids=lambda changes: str(changes)[:50],
)
def test_a_content_that_is_wrong_is_refused(made: Invitation, changes: dict[str, Any]) -> None:
    def line(content: Any) -> str:
        text = json.dumps(list(content.values())).encode() + b"\n" + bytes(30_000)
        return packed(f"{__version__}\n".encode() + zlib.compress(text))

    right = asdict(made) | {"member_file": [["PRIVATE KEY", 138]]}
    assert invitation_in(line(right)).slot == 5
    assert "a content that no `megatron-noloco invite` writes" in refused(line(right | changes))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not compressed",
        *map(zlib.compress, (b"", b"[]", b"[" * 60_000, b"null\n", b"{}", bytes(10**7))),
    ],
    ids=range(8),
)
def test_a_hostile_content_is_refused_with_a_line(content: bytes) -> None:
    assert "a content that no" in refused(packed(f"{__version__}\n".encode() + content))


def test_a_folder_needs_no_address(made: Invitation) -> None:
    for folder in ("file:///shared/run of \u00e4", "s3://bucket/run"):
        through = replace(made, folder=folder, addresses=[])
        assert invitation_in(line_of(through)) == through


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
