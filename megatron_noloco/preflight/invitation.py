"""An invitation: a text with which one more machine joins a federation, in a file or as a line to paste.

It holds a member file (see `keys`), where the other members are, and what the config of the new member needs. The
text is base64 of the version of the program, of compressed JSON and certificates, and of four bytes of SHA-256.

The slots that were given away are in a record beside the key file, until their invitations end.
"""

import base64
import binascii
import fcntl
import hashlib
import hmac
import json
import re
import time
import zlib
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_noloco import __version__
from megatron_noloco.errors import UserError
from megatron_noloco.federation.statuses import is_address
from megatron_noloco.files import outside
from megatron_noloco.settings import MOST_SLOTS

PRETRAINED = "pretrained"
MOST_ADDRESSES = 16
LONGEST_LINE = 2000  # characters that every terminal and mail takes
DIGEST_DIGITS = 32
_BEGINNING = "noloco-"
_CHECK_BYTES = 4
_LONGEST = 2**14  # characters of an invitation, as it was wrapped and quoted
_MOST_BYTES = 2**18
_WIDTH = 100  # characters of a line in a file
_PEM = re.compile(r"-----BEGIN ([A-Z ]+)-----\n([\w+/=\n]+)-----END \1-----\n", re.ASCII)
_PEM_WIDTH = 64

Slot = Annotated[int, Field(ge=0, lt=MOST_SLOTS)]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Invitation:
    """What a newcomer gets.

    Attributes:
        run: number of the run.
        slot: that the newcomer takes.
        member_file: PEM, see `keys`.
        folder: URL of the rendezvous, where it is a folder or a bucket; "": it is the addresses.
        addresses: HOST:PORT of members.
        config: the fields that all jobs share, see `config.agreed`.
        needs: what a newcomer must have itself: fields of the block `data`, any of which says what is read, unless
            every machine has it; PRETRAINED where the run began with pretrained weights.
        tokenizer: digest of the piece with the tokenizer's files.
    """

    run: Annotated[int, Field(ge=0, lt=2**63)]
    slot: Slot
    member_file: Annotated[str, Field(max_length=2**14)]
    folder: Annotated[str, Field(max_length=600)]
    addresses: Annotated[list[str], Field(max_length=MOST_ADDRESSES)]
    config: dict[str, Any]
    needs: list[
        Literal["text", "data_path", "train_data_path", "valid_data_path", "sft_data_path", "pretrained"]
    ]
    tokenizer: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{DIGEST_DIGITS}}}$")]


_INVITATIONS = TypeAdapter(Invitation)


def can_name(folder: str) -> bool:
    """Return whether an invitation can name a folder by this URL."""
    return re.fullmatch(r"(file|s3|gs|gcs|az|abfs)://[^\x00-\x1f\x7f-\x9f]{1,500}", folder) is not None and (
        "::" not in folder  # which makes fsspec open another place
    )


def line_of(invitation: Invitation) -> str:
    """Return an invitation as one line."""
    blocks = [(label, base64.b64decode(body)) for label, body in _PEM.findall(invitation.member_file)]
    content = asdict(invitation) | {"member_file": [(label, len(data)) for label, data in blocks]}
    text = json.dumps(list(content.values()), separators=(",", ":")).encode()
    # Certificates repeat each other's bytes, which base64 would hide from the compression.
    packed = zlib.compress(b"\n".join([text, b"".join(data for _, data in blocks)]), 9)
    whole = f"{__version__}\n".encode() + packed
    return _BEGINNING + base64.urlsafe_b64encode(whole + _check(whole)).decode().rstrip("=")


def file_of(line: str, slot: int, until: str) -> str:
    """Return the content of a file with an invitation; `join` skips the sentences around it."""
    wrapped = "\n".join(line[start : start + _WIDTH] for start in range(0, len(line), _WIDTH))
    return (
        f"An invitation to be replica {slot} of a federation of megatron_noloco until {until}.\n"
        "Keep it as you keep a key. On the machine that joins run the command that `invite` has printed.\n\n"
        f"{wrapped}\n"
    )


def invitation_in(text: str) -> Invitation:
    """Return the invitation in a text: a mail may wrap or quote it, and have other words around it.

    Raises UserError where the invitation is not as it was written, or of another version of the program.
    """
    for found in re.finditer(_BEGINNING, text):
        line = ""
        for word in re.split("[^!-~]+", text[found.start() :][:_LONGEST]):
            line += "".join(re.findall(r"^[>|]*([\w-]+)", word, re.ASCII))
            if (content := _content_of(line)) is not None:
                return _unpacked(content)
    if _BEGINNING not in text:
        raise UserError(
            f'join: this is no invitation, which begins with "{_BEGINNING}": give the file or the line of '
            "`megatron-noloco invite`"
        )
    raise UserError(
        f'join: a part of the invitation is missing or changed: copy all from "{_BEGINNING}" to its end, or the '
        "file"
    )


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


def _content_of(line: str) -> bytes | None:
    """Return the bytes of a line; None for a line that is not as it was written."""
    text = line.removeprefix(_BEGINNING)
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except binascii.Error:
        return None
    content = data[:-_CHECK_BYTES]
    is_sound = hmac.compare_digest(data[-_CHECK_BYTES:], _check(content))
    # Base64 has several ways to write the same bytes.
    is_sound &= base64.urlsafe_b64encode(data).decode().rstrip("=") == text
    return content if is_sound else None


def _unpacked(content: bytes) -> Invitation:
    """Return the invitation of a sound line. Raises UserError."""
    version, _, packed = content.partition(b"\n")
    if content.startswith(b'["'):  # up to version 0.4
        version = content[2:].partition(b'"')[0]
    if version != __version__.encode():
        theirs = outside(version.decode(errors="replace"))
        raise UserError(
            f"join: the invitation is of megatron_noloco {theirs}, this machine has {__version__}; install the "
            "same version"
        )
    try:
        text, _, data = zlib.decompressobj().decompress(packed, _MOST_BYTES).partition(b"\n")
        fields = dict(zip(Invitation.__dataclass_fields__, json.loads(text), strict=True))
        member_file = ""
        for label, size in fields["member_file"]:
            body = base64.b64encode(data[:size]).decode()
            lines = [body[start : start + _PEM_WIDTH] for start in range(0, len(body), _PEM_WIDTH)]
            member_file += "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----\n"])
            data = data[size:]
        fields["member_file"] = member_file
        invitation = _INVITATIONS.validate_json(json.dumps(fields))
        is_somewhere = can_name(invitation.folder) if invitation.folder else bool(invitation.addresses)
        if not (is_somewhere and all(map(is_address, invitation.addresses))):
            raise ValueError("no place where the others are")
    except (zlib.error, ValueError, TypeError, KeyError, ValidationError, RecursionError):
        raise UserError(
            "join: the invitation has a content that no `megatron-noloco invite` writes"
        ) from None
    return invitation


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECK_BYTES]
