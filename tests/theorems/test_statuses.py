"""Signed statuses: which is the newest, and what is refused."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.statuses import (
    MOST_SIGNED_BYTES,
    MOST_STATUS_BYTES,
    PeerStatus,
    SignedStatus,
    StatusError,
    Statuses,
    is_address,
    split_address,
)
from tests.kit.ranks import federation_keys

RUN = 5
NOW = time.time_ns()


def statuses_of(slot: int, incarnation: int = NOW, run: int = RUN, keys: Keys | None = None) -> Statuses:
    return Statuses(run, Member(slot, incarnation), (keys or federation_keys()).identity(slot))


def signed_by(statuses: Statuses, **status: Any) -> SignedStatus:
    statuses.sign(PeerStatus(**status))
    assert statuses.own is not None
    return statuses.own


def passed_on(signed: SignedStatus) -> SignedStatus:
    assert signed.line.endswith(b"\n")
    return SignedStatus.parse(json.loads(signed.line))


def test_a_status_arrives_as_it_was_signed() -> None:
    one, other = (statuses_of(slot) for slot in (1, 2))
    status = PeerStatus(addresses=["a:1"], step=3, partners={7: 2}, rows=[(1, "ä")])
    one.sign(status)
    assert one.own is not None
    assert other.take(passed_on(one.own))
    assert other._newest[1].status == status
    assert other._newest[1].member == Member(1, NOW)


def test_later_processes_and_higher_numbers_replace_others() -> None:
    other = statuses_of(2)
    earlier, later = statuses_of(1, NOW), statuses_of(1, NOW + 1)
    first, second = signed_by(earlier, step=1), signed_by(earlier, step=2)
    assert other.take(second)
    assert not other.take(second)
    assert not other.take(first)
    assert other._newest[1].status.step == 2
    assert other.take(signed_by(later, step=3))
    assert not other.take(signed_by(earlier, step=4))
    assert other._newest[1].status.step == 3


def test_of_the_own_slot_only_later_processes_are_taken() -> None:
    own = statuses_of(1)
    for incarnation in (NOW - 1, NOW):
        assert not own.take(signed_by(statuses_of(1, incarnation)))
    assert own.take(signed_by(statuses_of(1, NOW + 1)))
    assert own._newest[1].member == Member(1, NOW + 1)


def test_a_status_is_of_one_member_number_text_and_run(tmp_path: Path) -> None:
    other, signed = statuses_of(2), signed_by(statuses_of(1), step=1)
    stranger = signed_by(statuses_of(1, keys=Keys.make(tmp_path / "key")), step=1)
    forged = [
        replace(signed, member=Member(3, NOW)),
        replace(signed, member=Member(1, NOW + 1)),
        replace(signed, number=2),
        replace(signed, text='{"step":2}'),
        replace(signed, signature=b""),
        replace(signed, certificate=b""),
        signed_by(statuses_of(1, run=RUN + 1), step=1),
        stranger,
    ]
    for one in forged:
        with pytest.raises(ValueError):
            other.take(one)
    assert other.newest() == []
    assert other.take(signed)


def test_a_process_that_starts_in_the_future_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    day = 86_400 * 10**9
    ahead = signed_by(statuses_of(1, time.time_ns() + 2 * day))
    with pytest.raises(ValueError, match="more than a day after this machine's time"):
        statuses_of(2).take(ahead)
    assert statuses_of(2).take(signed_by(statuses_of(1, time.time_ns() + day // 2)))
    monkeypatch.setattr("time.time_ns", lambda: 10**9)  # a machine without a clock cannot judge
    assert statuses_of(2).take(ahead)


def test_a_status_that_is_too_long_is_refused() -> None:
    one = statuses_of(1)
    with pytest.raises(ValueError, match="longer than"):
        signed_by(one, site="x" * MOST_STATUS_BYTES)
    longest = signed_by(one, site='"' * (MOST_STATUS_BYTES // 2 - 400))
    assert len(longest.line) < MOST_SIGNED_BYTES
    content = json.loads(longest.line) | {"text": "x" * (MOST_STATUS_BYTES + 1)}
    with pytest.raises(ValueError, match="is no status"):
        SignedStatus.parse(content)


@pytest.mark.parametrize(
    "change",
    [
        {"member": "x"},
        {"member": "4096.1"},
        {"member": "1.0"},
        {"member": 1},
        {"member": 1.5},
        {"number": 0},
        {"number": True},
        {"number": 2**63},
        {"number": "1"},
        {"text": 1},
        {"certificate": "YW"},
        {"signature": None},
    ],
)
def test_malformed_statuses_are_refused(change: dict[str, Any]) -> None:
    content = json.loads(signed_by(statuses_of(1)).line)
    with pytest.raises(ValueError):
        SignedStatus.parse(content | change)
    for other in (None, [], "x", {}):
        with pytest.raises(ValueError):
            SignedStatus.parse(other)


@pytest.mark.parametrize("text", ["[]", "1", "no JSON", "[" * 8000])
def test_a_text_that_is_no_object_is_refused(text: str) -> None:
    one, statuses = statuses_of(1), statuses_of(2)
    signed = replace(signed_by(one), text=text)
    signed = replace(signed, signature=one.identity.sign(signed.signed_text(RUN)))
    with pytest.raises(ValueError):
        statuses.take(signed)
    assert statuses.newest() == []


def test_addresses_of_others_are_at_most_four_that_are_in_order() -> None:
    good = ["host:1", "1.2.3.4:65535", "[::1]:80", "a-b.c:9", "one.more:1"]
    one, other = (statuses_of(slot) for slot in (1, 2))
    for given, kept in ((["", "host", "a b:1", "host:70000"], []), (["host:0", *good[:3]], good[:3])):
        assert other.take(passed_on(signed_by(one, addresses=given)))
        assert other._newest[1].status.addresses == kept
    for malformed in (good, "host:1", [3]):
        with pytest.raises(StatusError, match="the status of replica 1 is malformed"):
            other.take(passed_on(signed_by(one, addresses=malformed)))
    assert all(map(is_address, good))
    assert not any(map(is_address, ["x" * 300 + ":1", "::1:80", "host:1\n", "host:1/x", "@host:1"]))
    assert split_address("[::1]:80") == ("::1", 80)
