"""The line of an invitation: which job to ask, whom to trust, and a secret that is good for one newcomer.

The line is base64 of a JSON list and four bytes of its SHA-256.
"""

import base64
import binascii
import hashlib
import hmac
import json
import re
from contextlib import suppress
from dataclasses import asdict

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_noloco.errors import UserError

_BEGINNING = "noloco-"
_CHECK_BYTES = 4
_LONGEST = 2**14  # characters of a line, as it was wrapped and quoted


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Ticket:
    """The content of the line.

    Attributes:
        version: of the program.
        endpoint: of the job that made the invitation.
        fingerprint: of the certificate that answers, SHA-256, hexadecimal.
        secret: which the newcomer shows.
    """

    version: str = Field(pattern="^[!-~]{1,64}$")
    endpoint: str = Field(pattern="^tcp://[!-~]{1,255}:[0-9]{1,5}$")
    fingerprint: str = Field(pattern="^[0-9a-f]{64}$")
    secret: str = Field(pattern="^[0-9a-f]{32}$")


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
    """Return the ticket of a line; raises ValueError for a line that is not as it was printed."""
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


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECK_BYTES]
