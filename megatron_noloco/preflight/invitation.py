"""An invitation: a file with which one more machine joins a federation.

It is JSON: a member file (see `keys`), where the other members are, the tokenizer, and what the config of the new
member needs. The slots that were given away are in a record beside the key file,
until their invitations end.
"""

import fcntl
import json
import re
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_noloco import __version__
from megatron_noloco.errors import UserError
from megatron_noloco.federation.statuses import is_address, object_in
from megatron_noloco.files import outside
from megatron_noloco.settings import MOST_SLOTS

PRETRAINED = "pretrained"
MOST_ADDRESSES = 16
MOST_BYTES = 2**26
_NO_INVITATION = "has a content that no `megatron-noloco invite` writes"


def _checked_address(text: str) -> str:
    if not is_address(text):
        raise ValueError("no address")
    return text


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Invitation:
    """What a newcomer gets.

    Attributes:
        slot: that the newcomer takes.
        member_file: PEM, see `keys`.
        folder: URL of the rendezvous, where it is a folder or a bucket; "": it is the addresses.
        addresses: HOST:PORT of members.
        config: the fields that all jobs share, see `config.agreed`.
        needs: what a newcomer must have itself: fields of the block `data`, any of which says what is read, unless
            every machine has it; PRETRAINED where the run began with pretrained weights.
        tokenizer: see `Tokenizer.kept`.
    """

    slot: Annotated[int, Field(ge=0, lt=MOST_SLOTS)]
    member_file: Annotated[str, Field(max_length=2**14)]
    folder: Annotated[str, Field(max_length=600)]
    addresses: Annotated[
        list[Annotated[str, AfterValidator(_checked_address)]], Field(max_length=MOST_ADDRESSES)
    ]
    config: dict[str, Any]
    needs: list[
        Literal["text", "data_path", "train_data_path", "valid_data_path", "sft_data_path", "pretrained"]
    ]
    tokenizer: str


_INVITATIONS = TypeAdapter(Invitation)


def can_name(folder: str) -> bool:
    """Return whether an invitation can name a folder by this URL."""
    return re.fullmatch(r"(file|s3|gs|gcs|az|abfs)://[^\x00-\x1f\x7f-\x9f]{1,500}", folder) is not None and (
        "::" not in folder  # which makes fsspec open another place
    )


def text_of(invitation: Invitation) -> str:
    """Return the content of the file."""
    return json.dumps({"megatron_noloco": __version__} | asdict(invitation), indent=1) + "\n"


def invitation_in(text: str) -> Invitation:
    """Return the invitation in a text. Raises UserError for another text, or that of another version."""
    try:
        content = object_in(text)
    except ValueError:
        raise UserError(
            "join: this is no invitation, or a part of it is missing: give the file of `megatron-noloco invite`"
        ) from None
    version = content.pop("megatron_noloco", None)
    if version != __version__:
        if not isinstance(version, str):
            raise UserError(f"join: the invitation {_NO_INVITATION}")
        raise UserError(
            f"join: the invitation is of megatron_noloco {outside(version)}, this machine has {__version__}; "
            "install the same version"
        )
    try:
        invitation = _INVITATIONS.validate_json(json.dumps(content))
    except (ValueError, ValidationError):
        raise UserError(f"join: the invitation {_NO_INVITATION}") from None
    if not (can_name(invitation.folder) if invitation.folder else invitation.addresses):
        raise UserError(f"join: the invitation {_NO_INVITATION}")
    return invitation


def reserve(key_file: Path, slot: int | None, known: Container[int], ends: float) -> int:
    """Note in the record beside a key file that a slot is given away; return the slot.

    Args:
        slot: None: the lowest that is neither known nor given away.
        known: slots that are in use.
        ends: Unix time until which the slot is given away.

    Raises UserError where no slot is left, OSError where the record cannot be written.
    """
    with key_file.with_name(f"{key_file.name}.invited").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two commands at once do not give away one slot
        file.seek(0)
        text = file.read()
        if slot is None:
            given = _given_away(text)
            free = (slot for slot in range(MOST_SLOTS) if slot not in given and slot not in known)
            slot = next(free, None)
        if slot is None:
            raise UserError(f"invite: all {MOST_SLOTS} slots are taken; give one away with --slot")
        begin = "\n" * (text[-1:] not in ("", "\n"))
        file.write(begin + json.dumps({"slot": slot, "ends": ends, "invited": time.time()}) + "\n")
    return slot


def _given_away(record: str) -> set[int]:
    """Return the slots of invitations that have not ended; a line that was cut says nothing."""
    slots = set()
    for line in record.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            content = json.loads(line)
            if content["ends"] > time.time():
                slots.add(int(content["slot"]))
    return slots
