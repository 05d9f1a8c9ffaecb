"""The line of an invitation: where to ask, whom to trust, and a secret that is good for one newcomer.

The line is base64 of a JSON object and four bytes of its SHA-256. The secret is a time of expiry, a random
number, perhaps a slot, and their HMAC with the key of the federation: who has the key can make it and check it,
and nothing is stored until it is used.
"""

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_noloco.errors import UserError

_BEGINNING = "noloco-"
_CHECK_BYTES, _MAC_BYTES = 4, 16
_LONGEST = 2**14  # characters of a line, as it was wrapped and quoted


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Ticket:
    """What the line holds.

    Attributes:
        version: of the program.
        addresses: "HOST:PORT", any of which may answer.
        fingerprint: of the certificate that answers, SHA-256, hexadecimal.
        secret: see `new_secret`.
    """

    version: str = Field(pattern="^[!-~]{1,64}$")
    addresses: list[Annotated[str, Field(pattern="^[!-~]{1,255}:[0-9]{1,5}$")]] = Field(
        min_length=1, max_length=16
    )
    fingerprint: str = Field(pattern="^[0-9a-f]{64}$")
    secret: str = Field(pattern="^[0-9a-f]+[.][0-9a-f]{16}[.][0-9]*[.][0-9a-f]{32}$")


_TICKETS = TypeAdapter(Ticket)


def line_of(ticket: Ticket) -> str:
    """Return the line of a ticket."""
    content = json.dumps(list(asdict(ticket).values()), separators=(",", ":")).encode()
    return _BEGINNING + base64.urlsafe_b64encode(content + _check(content)).decode().rstrip("=")


def ticket_in(text: str) -> Ticket:
    """Return the ticket of the line in a text: a mail may wrap or quote it, and have other words around it.

    Raises UserError where the line is not as it was printed.
    """
    for found in re.finditer(_BEGINNING, text):
        line = ""
        for word in re.split("[^!-~]+", text[found.start() :][:_LONGEST]):
            line += "".join(re.findall(r"^[>|]*([\w-]+)", word, re.ASCII))
            with suppress(ValueError):
                return _ticket_of(line)
    if _BEGINNING not in text:
        raise UserError(
            f'join: this is no invitation, which begins with "{_BEGINNING}": give the line that `megatron-noloco '
            "invite` printed"
        )
    raise UserError(
        f'join: a part of the invitation is missing or changed: copy all from "{_BEGINNING}" to its end, or send '
        "it as a file, and give `join - < FILE`"
    )


def _ticket_of(line: str) -> Ticket:
    """Return the ticket of a line; raises UserError for one that is not as it was printed."""
    refused = ValueError("no invitation")
    text = line.removeprefix(_BEGINNING)
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        content, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if not hmac.compare_digest(check, _check(content)):
            raise refused
        names = list(Ticket.__dataclass_fields__)
        ticket = _TICKETS.validate_json(json.dumps(dict(zip(names, json.loads(content), strict=True))))
    except (binascii.Error, ValueError, TypeError, ValidationError, RecursionError):
        raise refused from None
    if line_of(ticket) != line:  # base64 has several ways to write the same bytes
        raise refused
    return ticket


def new_secret(key: bytes, seconds: float, slot: int | None = None) -> str:
    """Return a secret that is valid for so many seconds.

    Args:
        slot: that the newcomer takes, whoever had it; None: a free one.
    """
    said = f"{int(time.time() + seconds):x}.{secrets.token_hex(8)}.{'' if slot is None else slot}"
    return f"{said}.{_mac(key, said)}"


def problem_of(key: bytes, secret: str) -> str:
    """Return why a secret does not count; "" where it does. Whether it was used is not looked at."""
    said, _, mac = secret.rpartition(".")
    if not hmac.compare_digest(mac.encode(), _mac(key, said).encode()):
        return "this invitation is of another federation, or its key is another one by now"
    if int(said.partition(".")[0], 16) < time.time():
        return "this invitation has expired; ask for a new one"
    return ""


def slot_in(secret: str) -> int | None:
    """Return the slot that a secret gives; None: any free one."""
    slot = secret.split(".")[2]
    return int(slot) if slot else None


def name_of(secret: str) -> str:
    """Return what tells a secret from others, and does not reveal it."""
    return secret.split(".")[1]


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECK_BYTES]


def _mac(key: bytes, said: str) -> str:
    return hmac.digest(key, f"invitation {said}".encode(), "sha256")[:_MAC_BYTES].hex()
