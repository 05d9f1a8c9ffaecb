"""The key of a federation, which all its members have, and what it encrypts: connections, and files of a folder.

It is a file with a private key and its self-signed certificate.

Both sides of each connection between members show that they have the key (TLS 1.3). A newcomer has no key yet: it
knows only the fingerprint of the certificate, and shows no certificate.

A file in a shared folder is encrypted and authenticated (AES-256-GCM) together with its name. Who owns the folder
can neither read it, nor change it, nor give it another name. Without a key, a checksum of name and content shows
damage, and nothing else.
"""

import hashlib
import os
import ssl
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_noloco.errors import UserError

_NAME = "megatron_noloco federation"
_BEGIN = "-----BEGIN CERTIFICATE-----"
_MARK = b"NL"  # then: which wrapping
_NONCE_BYTES = 12  # drawn; the key is good for 2**32 files
_CHECKSUM_BYTES = 4
MOST_ADDED = 64  # bytes; more than a wrapping adds
_OLD = '{"'  # up to version 0.2 the file was JSON, with keys for ZeroMQ


@dataclass(frozen=True)
class Keys:
    """What encrypts the connections that this process opens, and those of others.

    Attributes:
        dials: for connections that this process opens.
        admits: for connections of members, and of processes that show no certificate.
        fingerprint: of the certificate that the other side must show.
        path: of the key file; "." of a newcomer, which has none.
    """

    dials: ssl.SSLContext
    admits: ssl.SSLContext
    fingerprint: str
    path: Path = Path()

    @classmethod
    def of_newcomer(cls, fingerprint: str) -> "Keys":
        """Return what a process needs that has no key, and knows the fingerprint of the federation's.

        Nobody can connect to it.
        """
        return cls(_context(ssl.PROTOCOL_TLS_CLIENT), _context(ssl.PROTOCOL_TLS_SERVER), fingerprint)

    def matches(self, certificate: bytes | None) -> bool:
        """Whether a certificate (DER) is that of the federation."""
        return hashlib.sha256(certificate or b"").hexdigest() == self.fingerprint

    @classmethod
    def make(cls, path: Path) -> "Keys":
        """Draw a new key and write it to a file that only its owner can read.

        Raises FileExistsError where there is a file: a key in use is not overwritten.
        """
        content = _drawn()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Read a key; raises UserError, with one clear line, for a file that is missing or holds no key."""
        why = "holds no key"
        try:
            if path.read_text(errors="replace").startswith(_OLD):
                why = "is a key of an earlier version"
            dials, admits = (
                _context(role, path) for role in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
            )
            admits.verify_mode = ssl.CERT_OPTIONAL
            return cls(dials, admits, fingerprint_of(path), path)
        except ssl.SSLError:
            pass
        except OSError as error:
            raise UserError(f"federation.key_file: {path}: {error.strerror}") from None
        raise UserError(
            f"federation.key_file: {path} {why}; `megatron-noloco keys FILE` makes a new one, for all replicas"
        )


def fingerprint_of(path: Path) -> str:
    """Return the SHA-256 of the certificate in a key file, hexadecimal. Raises UserError and OSError."""
    certificate = path.read_text().partition(_BEGIN)
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert("".join(certificate[1:]))).hexdigest()


def _context(role: int, path: Path | None = None) -> ssl.SSLContext:
    """Return a context with a key; None: without a key, and any certificate is accepted."""
    context = ssl.SSLContext(role)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE if path is None else ssl.CERT_REQUIRED
    if path is not None:
        context.load_cert_chain(path, password="")  # never asks at the terminal
        context.load_verify_locations(path)
    if role == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nothing is sent that nobody waits for
    return context


def _drawn() -> bytes:
    """Return a new key and its certificate, as PEM. It is valid for ever: clocks of members may be wrong.

    Machines without a clock of their own begin at 1970.
    """
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


class Sealing(Protocol):
    """Wraps files. `open` raises ValueError, whose text ends a sentence that begins with the file."""

    def seal(self, name: str, content: bytes) -> bytes: ...

    def open(self, name: str, sealed: bytes) -> bytes: ...


class Checksum:
    """Wraps files without a key."""

    mark = _MARK + b"p"

    def seal(self, name: str, content: bytes) -> bytes:
        return self.mark + self._sum(name, content) + content

    def open(self, name: str, sealed: bytes) -> bytes:
        if sealed.startswith(Cipher.mark):
            raise ValueError("is encrypted, and this process has no key (federation.encryption)")
        start = len(self.mark) + _CHECKSUM_BYTES
        content = sealed[start:]
        if sealed[:start] != self.mark + self._sum(name, content):
            raise ValueError("is damaged, or of another version")
        return content

    @staticmethod
    def _sum(name: str, content: bytes) -> bytes:
        return zlib.crc32(content, zlib.crc32(name.encode())).to_bytes(_CHECKSUM_BYTES)


class Cipher:
    """Encrypts files with a key that follows from the private key of the federation."""

    mark = _MARK + b"e"

    def __init__(self, private: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        derived = HKDF(SHA256(), 32, salt=None, info=b"megatron_noloco files in a shared folder")
        self._key = AESGCM(derived.derive(private))

    @classmethod
    def read(cls, path: Path) -> "Cipher":
        """Read a key file, which `Keys.read` has checked."""
        from cryptography.hazmat.primitives import serialization

        private = serialization.load_pem_private_key(path.read_bytes(), None)
        return cls(
            private.private_bytes(
                serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )

    def seal(self, name: str, content: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return self.mark + nonce + self._key.encrypt(nonce, content, name.encode())

    def open(self, name: str, sealed: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        if sealed.startswith(Checksum.mark):
            raise ValueError("is not encrypted, and this process expects encryption (federation.encryption)")
        start = len(self.mark) + _NONCE_BYTES
        try:
            if not sealed.startswith(self.mark) or len(sealed) < start:
                raise InvalidTag
            return self._key.decrypt(sealed[len(self.mark) : start], sealed[start:], name.encode())
        except InvalidTag:
            raise ValueError(
                "is of a process with another key (all need the same key_file), or was changed"
            ) from None
