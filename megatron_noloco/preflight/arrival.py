"""How a machine with an invitation comes to the others: what it measures, and what it fetches."""

import base64
import json
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron_noloco.errors import UserError
from megatron_noloco.federation.keys import Identity, Keys
from megatron_noloco.federation.mesh import MOST_PIECE_BYTES, LostError
from megatron_noloco.federation.store import Store, seconds_of_calls
from megatron_noloco.federation.visit import LinkSpeed, Visit
from megatron_noloco.files import outside
from megatron_noloco.preflight.invitation import Invitation
from megatron_noloco.preflight.newcomer import TOKENIZER, digest_of_piece, file_of_piece, write_private

_FILE = re.compile(  # of a tokenizer
    r"(tokenizer|tokenizer_config)\.json|read_by_transformers|"
    r"(additional_chat_templates/[\w-][\w.-]*|chat_template)\.jinja",
    re.ASCII,
)
_PROBE_BYTES = 2**20  # that `seconds_of_calls` writes and reads
_LINK = "The link to a member"


class Arrival(NamedTuple):
    """What a newcomer has measured and fetched.

    Attributes:
        tokenizer: files by name; none for bytes.
        way: what was measured: the link to a member, or the folder.
    """

    tokenizer: Mapping[str, bytes]
    way: str
    speed: LinkSpeed


def arrive(invitation: Invitation) -> Arrival:
    """Measure the way to the others, and fetch the tokenizer. Raises UserError."""
    try:
        identity = _identity(invitation)
        if invitation.folder:
            return _through_folder(invitation, identity)
        visit = Visit(identity, invitation.run, invitation.addresses)
        return Arrival(_files_of(_offered(visit, invitation)), _LINK, visit.measure())
    except UserError as error:
        raise UserError(f"join: {error}") from None


def _identity(invitation: Invitation) -> Identity:
    with tempfile.TemporaryDirectory() as folder:
        write_private(path := Path(folder) / "member.pem", invitation.member_file)
        try:
            return Keys.read(path).identity(invitation.slot)
        except UserError as error:
            raise UserError(str(error).replace(f"federation.key_file: {path}", "the invitation")) from None


def _offered(visit: Visit, invitation: Invitation) -> bytes:
    """Return the piece with the tokenizer, of a member that offers that of the invitation."""
    reasons = list[str]()
    for member, status in visit.statuses().items():
        if status.get("addresses") and status.get("phase") != "left":
            try:
                piece = visit.piece(member, TOKENIZER)
            except LostError as error:
                reasons.append(f"replica {member.slot} {error}")
                continue
            except UserError as error:
                reasons.append(str(error))
                continue
            if digest_of_piece(piece) == invitation.tokenizer:
                return piece
            reasons.append(f"replica {member.slot} has other files")
    raise UserError(
        f"no job gives the tokenizer of the invitation ({'; '.join(reasons) or 'no job is there'})"
    )


def _through_folder(invitation: Invitation, identity: Identity) -> Arrival:
    """Fetch from the folder, and measure a link, or the folder if no member can be dialled."""
    store = Store.of(invitation.folder)
    try:
        piece = bytes(store.get(file_of_piece(invitation.tokenizer), MOST_PIECE_BYTES))
        if digest_of_piece(piece) != invitation.tokenizer:
            raise UserError(f"{outside(store.url)} has another tokenizer than the invitation")
        files = _files_of(piece)
        if invitation.addresses:
            with suppress(UserError):
                visit = Visit(identity, invitation.run, invitation.addresses)
                return Arrival(files, _LINK, visit.measure())
        seconds = seconds_of_calls(store)
    except OSError as error:
        raise UserError(
            f"{error}: the jobs meet in {outside(store.url)}, which must be the same folder on this machine"
        ) from None
    rate = _PROBE_BYTES / max(seconds["write"], seconds["read"], 1e-6)
    return Arrival(files, f"The folder {outside(store.url)}", LinkSpeed(rate, seconds["list"]))


def _files_of(piece: bytes) -> dict[str, bytes]:
    """Return the files in a piece, by name. Raises UserError for a piece that is no tokenizer's."""
    try:
        files = json.loads(piece)
        if all(map(_FILE.fullmatch, files)):
            return {name: base64.b64decode(content, validate=True) for name, content in files.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise UserError("the invitation names a piece that is no tokenizer")
