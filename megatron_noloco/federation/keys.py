"""The key of a federation, which all its members have.

One pair of Curve25519 keys serves all jobs of a run. ZeroMQ's CURVE (http://curvezmq.org) then authenticates both
ends of each connection and encrypts what passes, with new keys for each connection.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

_DOMAIN = "megatron_noloco"


@dataclass(frozen=True)
class Keys:
    """A pair of keys, in Z85, 40 characters each."""

    public: bytes
    secret: bytes

    @classmethod
    def make(cls, path: Path) -> "Keys":
        """Draw new keys and write them to a file that only its owner can read.

        Raises FileExistsError where there is a file: a key in use is not overwritten.
        """
        public, secret = zmq.curve_keypair()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps({"public": public.decode(), "secret": secret.decode()}) + "\n")
        return cls(public, secret)

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Read keys; raises ValueError, with one clear line, for a file that is missing or holds no key."""
        try:
            raw = json.loads(path.read_text())
            keys = cls(raw["public"].encode(), raw["secret"].encode())
            if zmq.curve_public(keys.secret) == keys.public:
                return keys
        except OSError as error:
            raise ValueError(f"federation.key_file: {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError):
            pass
        raise ValueError(
            f"federation.key_file: {path} holds no key; `megatron-noloco keys FILE` makes one, for all replicas"
        )

    def listening(self, socket: "zmq.Socket[Any]") -> None:
        """Restrict a socket, before it is bound, to members; `answer` decides who is one."""
        socket.curve_server = True
        socket.zap_domain = _DOMAIN.encode()
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def connecting(self, socket: "zmq.Socket[Any]") -> None:
        """Restrict a socket, before it connects, to members."""
        socket.curve_serverkey = socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Answer ZeroMQ's question whether a key is admitted (ZAP, RFC 27)."""
        version, identifier, domain, _, _, mechanism, *credentials = request
        own = z85.decode(self.public)
        is_member = (domain, mechanism, credentials) == (_DOMAIN.encode(), b"CURVE", [own])
        status = (b"200", b"OK") if is_member else (b"400", b"not a member")
        return [version, identifier, *status, b"", b""]
