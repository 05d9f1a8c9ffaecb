"""Answers newcomers with an invitation: over HTTPS, with the certificate of the federation's key.

| request | answer |
|---|---|
| GET /about | what the newcomer must have itself (`About`) |
| GET /bytes/N, POST /bytes | N bytes, or none: to measure the link |
| GET /welcome | all that it needs (`Welcome`), once |

Each request names the secret of the invitation. None of them is logged.
"""

import base64
import json
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from megatron_noloco.config import RunConfig
from megatron_noloco.config.deepspeed_block import MICRO, STEPS, TRAIN, prepared
from megatron_noloco.config.old_forms import in_todays_form
from megatron_noloco.data.corpus import STANDARD_LIBRARY
from megatron_noloco.data.tokenizer import build_tokenizer
from megatron_noloco.federation.network import listening
from megatron_noloco.federation.rendezvous import Seeds
from megatron_noloco.files import write_text
from megatron_noloco.invitation.agreed import divided
from megatron_noloco.invitation.ticket import name_of, problem_of, slot_in
from megatron_noloco.settings import MOST_SLOTS

MOST_BYTES = 2**25  # that are sent to measure the link
_SECONDS = 30.0  # for a request
_MOST_CONNECTIONS = 32
DataField = Literal["text", "data_path", "train_data_path", "valid_data_path", "sft_data_path"]
DATA = get_args(DataField)
_FILE = (  # of a tokenizer
    r"^((tokenizer|tokenizer_config|special_tokens_map)\.json|"
    r"(additional_chat_templates/[\w.-]+|chat_template)\.jinja)$"
)


def _seeds(text: str) -> str:
    """Return addresses of jobs; raises UserError for any other rendezvous, such as a folder."""
    Seeds.of(text.removeprefix("tcp://"))
    return text


def _base64(text: str) -> str:
    base64.b64decode(text, validate=True)
    return text


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class About:
    """What a newcomer must have itself.

    Attributes:
        data: fields of the block `data`, any of which says what is read; none where every machine has it.
        pretrained: whether the run began with pretrained weights.
    """

    data: list[DataField]
    pretrained: bool


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Welcome:
    """What a newcomer gets.

    Attributes:
        slot: that it takes.
        config: the fields that all jobs share, see `agreed`.
        rendezvous: addresses of jobs that are there.
        key: content of the key file.
        tokenizer: files in base64, by name; none for bytes.
    """

    slot: Annotated[int, Field(ge=0, lt=MOST_SLOTS)]
    config: dict[str, Any]
    rendezvous: Annotated[str, Field(pattern="^tcp://"), AfterValidator(_seeds)]
    key: Annotated[str, Field(max_length=2**14)]
    tokenizer: dict[Annotated[str, Field(pattern=_FILE)], Annotated[str, AfterValidator(_base64)]]


ABOUT, WELCOME = TypeAdapter(About), TypeAdapter(Welcome)


class Desk:
    """Knows what newcomers get, and which invitations and slots are used.

    Args:
        raw: the config as its file has it.
        secret: made of the federation's key, see `ticket`.
        taken: returns the addresses of jobs that are known, by slot, "" where none can be reached there.
        folder: keeps the slots that were given, a file for each invitation.
        tell: is called with a line for each newcomer.
    """

    def __init__(
        self,
        raw: dict[str, Any],
        secret: bytes,
        taken: Callable[[], dict[int, str]],
        folder: Path,
        tell: Callable[[str], object],
    ) -> None:
        self._config, self._raw, self._secret = RunConfig.from_dict(raw), raw, secret
        self._taken, self._folder, self._tell = taken, folder, tell
        self._one_at_a_time = threading.Lock()

    def problem(self, secret: str) -> str:
        """Return why a secret does not count, or counts no more."""
        with suppress(ValueError, IndexError):
            used = "this invitation was used already; ask for a new one"
            return problem_of(self._secret, secret) or (used if self._file(secret).exists() else "")
        return "no invitation is named"

    def about(self) -> About:
        data = self._raw.get("data", {})
        fields = [name for name in DATA if data.get(name) and data[name] != STANDARD_LIBRARY]
        return About(fields, self._config.training.pretrained is not None)

    def welcome(self, secret: str, host: str) -> Welcome | str:
        """Return what a newcomer gets, and note that its invitation is used; or why it gets nothing."""
        try:
            found = self._welcome(secret)
        except (OSError, ValueError) as error:  # of this machine: both sides learn of it
            found = f"the machine that invites cannot let anybody in: {error}"
            self._tell(f"{host} gets nothing: {error}")
        if isinstance(found, Welcome):
            self._tell(f"{host} takes slot {found.slot}")
        return found

    def _welcome(self, secret: str) -> Welcome | str:
        with self._one_at_a_time:
            if problem := self.problem(secret):
                return problem
            addresses = self._taken()
            used = {*addresses, *(int(path.read_text()) for path in self._folder.glob("[!.]*"))}
            free = [slot for slot in range(MOST_SLOTS) if slot not in used]
            if (given := slot_in(secret)) is not None:
                free = [given]
            if not free:
                return (
                    f"all {MOST_SLOTS} slots of the federation are taken; whoever invites can give that of a "
                    "machine which will not come back (invite --slot)"
                )
            seeds = sorted({place.removeprefix("tcp://") for place in addresses.values() if place})
            if not seeds:
                return "no job of the federation is found that could be joined; start one first"
            key = Path(str(self._config.federation.key_file)).read_text()
            rendezvous = "tcp://" + ",".join(seeds)
            found = Welcome(free[0], self._portable(), rendezvous, key, self._tokenizer())
            self._folder.mkdir(parents=True, exist_ok=True)
            write_text(self._file(secret), f"{free[0]}\n")
            return found

    def _file(self, secret: str) -> Path:
        return self._folder / name_of(secret)

    def _portable(self) -> dict[str, Any]:
        """Return what all jobs share. The batch is given whole, however the layout divides it here."""
        portable, _ = divided(prepared(in_todays_form(self._raw)[0]))
        portable.pop(STEPS, None)
        return portable | {TRAIN: self._config.replica_batch, MICRO: self._config.micro_batch_size}

    def _tokenizer(self) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            build_tokenizer(self._config.data.tokenizer).keep_in(kept := Path(folder) / "tokenizer")
            files = [path for path in kept.rglob("*") if path.is_file()]
            return {
                str(path.relative_to(kept)): base64.b64encode(path.read_bytes()).decode() for path in files
            }


def open_desk(desk: Desk, key_file: Path, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server that is to be run with `serve_forever`. Raises OSError where it cannot listen.

    Args:
        host: "*" for all interfaces.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(key_file, password="")

    class Handler(_Handler):
        asked, tls = desk, context

    return _Server(listening(host, port), Handler)


class _Server(ThreadingHTTPServer):
    """Has a thread for each connection. Further ones wait until the kernel refuses them."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._free = threading.Semaphore(_MOST_CONNECTIONS)

    def get_request(self) -> tuple[socket.socket, Any]:
        self._free.acquire()
        try:
            return super().get_request()
        except OSError:
            self._free.release()
            raise

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._free.release()

    def handle_error(self, *_: object) -> None:
        """Say nothing: strangers connect as well."""


class _Handler(BaseHTTPRequestHandler):
    """Runs the requests of a connection."""

    asked: Desk
    tls: ssl.SSLContext
    protocol_version = "HTTP/1.1"
    timeout = _SECONDS

    def setup(self) -> None:
        self.request.settimeout(_SECONDS)
        self.request = self.tls.wrap_socket(self.request, server_side=True)  # in the thread of the connection
        super().setup()

    def finish(self) -> None:
        super().finish()
        self.request.close()

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        secret = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if problem := self.asked.problem(secret):
            return self._answer(problem)
        match self.path.strip("/").split("/"):
            case ["about"]:
                self._answer(asdict(self.asked.about()))
            case ["bytes", size] if size.isdecimal() and int(size) <= MOST_BYTES:
                self._send(200, os.urandom(int(size)))
            case ["welcome"]:
                found = self.asked.welcome(secret, str(self.client_address[0]).removeprefix("::ffff:"))
                self._answer(found if isinstance(found, str) else asdict(found))
            case _:
                self._answer("there is nothing of this name")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        secret = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.asked.problem(secret) or not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True
            return self._answer("not measured")
        left = int(length)
        while left and (data := self.rfile.read(min(left, 1 << 20))):
            left -= len(data)
        return self._send(200, b"")

    def _answer(self, content: dict[str, Any] | str) -> None:
        refused = isinstance(content, str)
        self._send(403 if refused else 200, json.dumps({"problem": content} if refused else content).encode())

    def _send(self, code: int, body: bytes) -> None:
        self.send_response_only(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
