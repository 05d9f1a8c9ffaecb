"""A machine that joins with an invitation: asks for what it needs, measures the link, and writes its config."""

import base64
import hashlib
import http.client
import json
import os
import ssl
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from megatron_noloco import __version__
from megatron_noloco.config import ConfigError, RunConfig
from megatron_noloco.data.corpus import STANDARD_LIBRARY
from megatron_noloco.data.tokenizer import build_tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.rendezvous import can_listen
from megatron_noloco.files import outside, write_text
from megatron_noloco.invitation.agreed import divided, names_in
from megatron_noloco.invitation.desk import ABOUT, DATA, MOST_BYTES, WELCOME, About, Welcome
from megatron_noloco.invitation.ticket import Ticket
from megatron_noloco.preflight.memory import USABLE, fullest_stage

Answer = TypeVar("Answer", About, Welcome)
Read = TypeVar("Read", About, Welcome, dict[str, str])
_PROBLEM = TypeAdapter(dict[str, str])
_SECONDS = 20.0
_LONG_ENOUGH = 1.0  # seconds to measure a rate
_FIRST_BYTES = 2**18
_TRIPS = 5
_LONGEST_ANSWER = 2**27  # bytes


class Link(NamedTuple):
    """The measured link to the other machine: bytes per second of the slower way, and seconds one way."""

    rate: float
    latency: float


class Visit:
    """A connection to the machine that invites. As a context: it is closed at the end.

    Raises UserError where nobody answers, or somebody else does.
    """

    def __init__(self, ticket: Ticket) -> None:
        if ticket.version != __version__:
            raise UserError(
                f"join: the other side has megatron_noloco {ticket.version}, this machine {__version__}; install "
                "the same version"
            )
        self._headers = {"Authorization": f"Bearer {ticket.secret}"}
        reasons = []
        for address in ticket.addresses:
            try:
                self._connection = _connected(address, ticket.fingerprint)
                return
            except (OSError, http.client.HTTPException) as error:
                reasons.append(outside(f"{address}: {error}"))
        raise UserError(
            f"join: nobody answers ({'; '.join(reasons)}); is `megatron-noloco invite --serve` running there, and "
            "its port open?"
        )

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def about(self) -> About:
        return self._asked(ABOUT, "about")

    def welcome(self) -> Welcome:
        """Return what this machine needs. The invitation is used up then."""
        return self._asked(WELCOME, "welcome")

    def measure(self) -> Link:
        """Measure the link both ways, for some seconds."""
        trip = statistics.median(self._timed("GET", 0) for _ in range(_TRIPS))
        rates = []
        for method in ("GET", "POST"):
            size, seconds = _FIRST_BYTES, 0.0
            while seconds < _LONG_ENOUGH and size <= MOST_BYTES:
                seconds = max(1e-6, self._timed(method, size) - trip)
                rate, size = size / seconds, 4 * size
            rates.append(rate)
        return Link(min(rates), trip / 2)

    def _timed(self, method: str, size: int) -> float:
        """Return the seconds to get or to send so many bytes."""
        path, body = (f"bytes/{size}", None) if method == "GET" else ("bytes", os.urandom(size))
        started = time.perf_counter()
        self._request(method, path, body)
        return time.perf_counter() - started

    def _asked(self, kind: "TypeAdapter[Answer]", path: str) -> "Answer":
        return _read(kind, self._request("GET", path))

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        try:
            self._connection.request(method, f"/{path}", body, self._headers)
            answer = self._connection.getresponse()
            content = answer.read(_LONGEST_ANSWER + 1)
        except (OSError, http.client.HTTPException) as error:
            raise UserError(outside(f"join: the connection was lost: {error}") + "; try again") from None
        if len(content) > _LONGEST_ANSWER:
            raise UserError(f"join: the other side answers with more than {_LONGEST_ANSWER} bytes")
        if answer.status != 200:
            raise UserError(outside(f"join: {_read(_PROBLEM, content).get('problem')}"))
        return content


def _read(kind: "TypeAdapter[Read]", content: bytes) -> "Read":
    try:
        return kind.validate_json(content)
    except ValidationError:
        raise UserError("join: the other side answers what it should not") from None


def _connected(address: str, fingerprint: str) -> http.client.HTTPSConnection:
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate itself is compared
    connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=_SECONDS, context=context)
    connection.connect()
    certificate = connection.sock.getpeercert(binary_form=True)
    if hashlib.sha256(certificate or b"").hexdigest() != fingerprint:
        connection.close()
        raise ConnectionError("somebody else answers there, without the key of the federation")
    return connection


class Local(NamedTuple):
    """What is this machine's own.

    Attributes:
        folder: for config, key, tokenizer and the run.
        data: what is read, by field of the block `data`; "" for the field that the run has elsewhere.
        pretrained: the folder with the weights with which the run began.
        listen: see `FederationSettings`.
        gpus: bytes of memory of each.
    """

    folder: Path
    data: Mapping[str, str]
    pretrained: str | None = None
    listen: str = "tcp://*:0"
    gpus: tuple[int, ...] = ()


def gpus_here() -> tuple[int, ...]:
    """Return the bytes of memory of each GPU of this machine."""
    count = torch.cuda.device_count()
    return tuple(torch.cuda.get_device_properties(device).total_memory for device in range(count))


def check_local(about: About, local: Local) -> None:
    """Raise UserError where this machine lacks what it must have itself, or what is said of it is wrong."""
    if local.listen != "off" and not can_listen(local.listen):
        raise UserError(f'join: --listen: "{local.listen}" is neither "off" nor "tcp://HOST:PORT"')
    for name, path in local.data.items():
        if name and name not in DATA:
            raise UserError(f"join: --data {name}={path}: the fields are {', '.join(DATA)}")
        if (
            (name or _field(about)) in ("text", "sft_data_path")
            and path != STANDARD_LIBRARY
            and not Path(path).exists()
        ):
            raise UserError(f"join: --data {path}: there is no such file or folder")
    if local.pretrained is not None and not Path(local.pretrained).is_dir():
        raise UserError(f"join: --pretrained {local.pretrained}: there is no such folder")
    if about.data and not local.data:
        raise UserError(f"join: --data is missing: what this machine reads (data.{about.data[0]})")
    if about.pretrained and local.pretrained is None:
        raise UserError(
            "join: --pretrained is missing: the folder with the weights with which the run began, as elsewhere"
        )
    if local.folder.exists() and not (local.folder.is_dir() and not any(local.folder.iterdir())):
        raise UserError(
            f"join: {local.folder} is there already, and is no empty folder; give another --folder"
        )


def _field(about: About) -> str:
    """Return the field of the block `data` that the run has elsewhere."""
    return about.data[0] if about.data else "text"


def write_job(
    welcome: Welcome, about: About, local: Local, tell: Callable[[str], object]
) -> tuple[Path, int]:
    """Write config, key and tokenizer; return the config's file, and how many ranks the job has.

    Raises UserError for a config that is none.

    Args:
        tell: is called with a line that says what is taken from the machine that invites, and what is not.
    """
    folder = local.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    raw, left_out = divided(welcome.config)
    tell(f"Taken from the machine that invites: {', '.join(names_in(raw))}")
    if left_out:
        tell(outside(f"Left out, since each machine has its own: {', '.join(left_out)}"))
    for block in ("training", "federation", "data"):
        raw.setdefault(block, {})
    raw["training"] |= {"output_dir": str(folder / "run")}
    if local.pretrained is not None:
        raw["training"]["pretrained"] = _from_anywhere(local.pretrained)
    raw["federation"] |= {"rendezvous": welcome.rendezvous, "listen": local.listen}
    if local.data:
        raw["data"].pop("text", None)
    for name, path in local.data.items():
        raw["data"][name or _field(about)] = _from_anywhere(path)
    if welcome.tokenizer:
        for name, content in welcome.tokenizer.items():
            (copy := folder / "tokenizer" / name).parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(base64.b64decode(content))
        raw["data"]["tokenizer_model"] = str(folder / "tokenizer")
    key = folder / "federation.key"
    with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(welcome.key)
    Keys.read(key)
    raw["federation"]["key_file"] = str(key)
    try:
        raw, ranks = proposed(raw, local.gpus)
    except ConfigError as error:  # which quotes values
        raise UserError("\n".join(outside(f"join: {line}") for line in str(error).splitlines())) from None
    write_text(folder / "config.json", json.dumps(raw, indent=2) + "\n")
    return local.folder / "config.json", ranks


def _from_anywhere(path: str) -> str:
    """Return the same path for a job that starts in another folder."""
    return path if path == STANDARD_LIBRARY else str(Path(path).expanduser().absolute())


def proposed(raw: dict[str, Any], gpus: tuple[int, ...]) -> tuple[dict[str, Any], int]:
    """Return a config with a layout for the GPUs of this machine, and the number of its ranks.

    The smallest tensor-parallel size that fits into their memory; the other GPUs are data-parallel, as many as
    divide the batch, which stays what it is. Without GPUs a single rank.
    """
    raw = {**raw, "parallel": {}}
    whole = RunConfig.from_dict(raw)
    batch, micro = whole.replica_batch, whole.micro_batch_size
    best, ranks = raw, 1
    for tp in (size for size in (1, 2, 4, 8) if size <= len(gpus)):
        dp = max(size for size in range(1, len(gpus) // tp + 1) if batch % (micro * size) == 0)
        sizes = {"tensor_model_parallel_size": tp, "data_parallel_size": dp}
        found = {**raw, "gradient_accumulation_steps": batch // (micro * dp), "parallel": sizes}
        found.pop("train_batch_size", None)  # it would have to be the product of the others
        try:
            config = RunConfig.from_dict(found)
        except ConfigError:  # heads or columns do not divide into tp
            continue
        best, ranks = found, tp * dp
        if _gpu_bytes(config, ranks) <= USABLE * min(gpus):
            break
    return best, ranks


def _gpu_bytes(config: RunConfig, ranks: int) -> int:
    tokens = 0 if config.model.vocab_size is not None else build_tokenizer(config.data.tokenizer).vocab_size
    return fullest_stage(config, config.architecture(tokens), config.topology(ranks))[2].gpu_bytes


def arguments_of(config: Path, ranks: int, slot: int) -> list[str]:
    """Return the module that starts the job, for `python -m`, with its arguments."""
    train = ["megatron_noloco", "train", str(config), "--replica", str(slot)]
    return train if ranks == 1 else ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m", *train]
