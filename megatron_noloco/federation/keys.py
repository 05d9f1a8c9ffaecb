"""The key of a federation, member files, and the identity that a process takes from either.

| file | holds | lets its holder |
|---|---|---|
| key file | private key and certificate of the authority | run any slot, write member files |
| member file | private key and certificate of a slot, certificate of the authority, folder key | run that slot |

Both sides of a connection show a certificate of their slot, which the authority has issued (TLS 1.3). A process
signs its status with the certificate's private key. Two processes derive a secret from both of their keys.
"""

import base64
import datetime
import hmac
import os
import ssl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from megatron_noloco.errors import UserError
from megatron_noloco.settings import MOST_SLOTS

VISITOR = MOST_SLOTS  # the slot of commands that read, and are no member
ANY_MEMBER = "member.noloco"  # the host name that every certificate of a slot has
_CURVE = ec.SECP256R1()
_SIGNATURE = ec.ECDSA(hashes.SHA256())
_FIRST = datetime.datetime(1970, 1, 1)  # machines without a clock of their own begin there
_LAST = datetime.datetime(9999, 12, 31, 23, 59, 59)
_BEGIN_FOLDER_KEY, _END_FOLDER_KEY = "-----BEGIN NOLOCO FOLDER KEY-----", "-----END NOLOCO FOLDER KEY-----"
_MOST_CERTIFICATES = 2 * MOST_SLOTS  # whose checks are remembered
_MOST_CERTIFICATE_BYTES = 2**12


class _Checked(NamedTuple):
    """What a certificate says that the authority has issued."""

    public: ec.EllipticCurvePublicKey
    slot: int
    ends: float


class Keys:
    """The content of a key file or of a member file.

    Attributes:
        can_invite: whether it can write member files.
        slot: of a member file; None for a key file.
    """

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        certificates = x509.load_pem_x509_certificates(text.encode())
        self._private = _private_in(text)
        self._authority = certificates[-1]
        is_authority = self._authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        if (
            len(certificates) > 2
            or not is_authority
            or certificates[0].public_key() != self._private.public_key()
        ):
            raise ValueError
        self._certificate = certificates[0]
        self.can_invite = len(certificates) == 1
        self.slot = None if self.can_invite else _checked(self._certificate, self._authority).slot
        self._folder_key = (
            _derive(_der(self._private), b"folder") if self.can_invite else _folder_key_in(text)
        )

    @classmethod
    def of(cls, text: str, where: str) -> "Keys":
        """Return the keys in a text; raises UserError, with a line that begins with where the text is."""
        try:
            return cls(text, where)
        except (ValueError, TypeError, x509.ExtensionNotFound):  # TypeError: a key with a password
            raise UserError(
                f"{where} holds no key of this version; `megatron-noloco keys FILE` makes a new one, for all "
                "replicas"
            ) from None

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Read a key file or a member file; raises UserError."""
        where = f"federation.key_file: {path}"
        try:
            return cls.of(path.read_text(errors="replace"), where)
        except OSError as error:
            raise UserError(f"{where}: {error.strerror}") from None

    @classmethod
    def make(cls, path: Path) -> "Keys":
        """Draw a key and write it to a file that only its owner can read.

        Raises FileExistsError where there is a file: a key in use is not overwritten.
        """
        key = ec.generate_private_key(_CURVE)
        name = _name("megatron_noloco federation")
        certificate = _signed(name, key.public_key(), name, key, _LAST, [])
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(_pem(key) + certificate.public_bytes(Encoding.PEM).decode())
        except OSError:  # a full disk
            path.unlink()
            raise
        return cls.read(path)

    def identity(self, slot: int) -> "Identity":
        """Return the identity of this process, which runs this slot.

        Raises UserError where a member file is of another slot, or its time is over.
        """
        if self.can_invite:
            private = ec.generate_private_key(_CURVE)
            certificate = self._issue(slot, private.public_key(), _LAST)
            return Identity(private, certificate, self._authority, self._folder_key)
        if slot != self.slot:
            raise UserError(
                f"{self._where} is the member file of replica {self.slot}, and cannot run replica {slot}"
            )
        ends = self._certificate.not_valid_after_utc
        if ends.timestamp() < time.time():
            raise UserError(
                f"{self._where} was good until {ends:%Y-%m-%d %H:%M} UTC; ask for a new one "
                "(`megatron-noloco invite`)"
            )
        return Identity(self._private, self._certificate, self._authority, self._folder_key)

    def member_file(self, slot: int, ends: float) -> str:
        """Return a member file, whose holder can be this slot until a Unix time."""
        if not self.can_invite:
            raise UserError(f"{self._where} is a member file, and cannot invite; use the key file")
        private = ec.generate_private_key(_CURVE)
        last = datetime.datetime.fromtimestamp(ends, datetime.UTC).replace(microsecond=0, tzinfo=None)
        certificates = self._issue(slot, private.public_key(), last), self._authority
        texts = (certificate.public_bytes(Encoding.PEM).decode() for certificate in certificates)
        folder_key = base64.b64encode(self._folder_key).decode()
        return f"{_pem(private)}{''.join(texts)}{_BEGIN_FOLDER_KEY}\n{folder_key}\n{_END_FOLDER_KEY}\n"

    def _issue(self, slot: int, key: ec.EllipticCurvePublicKey, last: datetime.datetime) -> x509.Certificate:
        names = [ANY_MEMBER, host_name(slot)]
        return _signed(_name(f"slot {slot}"), key, self._authority.subject, self._private, last, names)


class Identity:
    """The identity of one process.

    Attributes:
        slot: that its certificate names.
        ends: Unix time after which its certificate is not good.
        certificate: DER.
        folder_key: 32 bytes that all members have, and nobody else.
        server: for connections that others open; they must show a certificate of this authority.
        client: for connections that this process opens; `server_hostname` is `host_name(slot)` or `ANY_MEMBER`.
    """

    def __init__(
        self,
        private: ec.EllipticCurvePrivateKey,
        certificate: x509.Certificate,
        authority: x509.Certificate,
        folder_key: bytes,
    ) -> None:
        self._private, self.folder_key = private, folder_key
        _, self.slot, self.ends = _checked(certificate, authority)
        self.certificate = certificate.public_bytes(Encoding.DER)
        self._check = lru_cache(_MOST_CERTIFICATES)(lambda der: _checked(_parsed(der), authority))
        with _chain_file(private, certificate) as chain:
            self.server = _context(ssl.PROTOCOL_TLS_SERVER, chain, authority)
            self.client = _context(ssl.PROTOCOL_TLS_CLIENT, chain, authority)

    def sign(self, text: bytes) -> bytes:
        """Return the signature of a text."""
        return self._private.sign(text, _SIGNATURE)

    def check(self, certificate: bytes, slot: int, text: bytes, signature: bytes) -> None:
        """Raise ValueError where a text is not signed by a process of a slot."""
        public, owner, ends = self._check(certificate)
        if owner != slot:
            raise ValueError(f"is signed by slot {owner}, not by slot {slot}")
        if ends < time.time():
            raise ValueError("has a certificate whose time is over")
        try:
            public.verify(signature, text, _SIGNATURE)
        except InvalidSignature:
            raise ValueError("has a wrong signature") from None

    def owner_of(self, certificate: bytes) -> tuple[int, float]:
        """Return the slot that a certificate (DER) names, and the Unix time of its end. Raises ValueError."""
        _, slot, ends = self._check(certificate)
        return slot, ends

    def pair_key(self, certificate: bytes) -> bytes:
        """Return 32 bytes that only this process and the holder of a certificate can compute.

        Raises ValueError for a certificate that is not of this federation.
        """
        secret = self._private.exchange(ec.ECDH(), self._check(certificate).public)
        return _derive(secret, b"pair")


def host_name(slot: int) -> str:
    """Return the host name in the certificates of a slot."""
    return f"slot-{slot}.noloco"


def _parsed(certificate: bytes) -> x509.Certificate:
    if len(certificate) > _MOST_CERTIFICATE_BYTES:
        raise ValueError("has too large a certificate")
    return x509.load_der_x509_certificate(certificate)


def _checked(certificate: x509.Certificate, authority: x509.Certificate) -> _Checked:
    """Return what a certificate says; raises ValueError where the authority has not issued it for a slot."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, TypeError):
        raise ValueError("has a certificate of another key") from None
    public = certificate.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise ValueError("has a certificate of another kind")
    return _Checked(public, _slot_in(certificate), certificate.not_valid_after_utc.timestamp())


def _slot_in(certificate: x509.Certificate) -> int:
    found = certificate.extensions
    try:
        is_authority = found.get_extension_for_class(x509.BasicConstraints).value.ca
        names = found.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
            x509.DNSName
        )
    except x509.ExtensionNotFound:
        raise ValueError("has a certificate of no slot") from None
    text = names[-1].removeprefix("slot-").removesuffix(".noloco")
    slot = int(text) if text.isascii() and text.isdecimal() else -1
    if is_authority or names != [ANY_MEMBER, host_name(slot)] or slot > VISITOR:
        raise ValueError("has a certificate of no slot")
    return slot


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    by: ec.EllipticCurvePrivateKey,
    last: datetime.datetime,
    hosts: list[str],
) -> x509.Certificate:
    """Return a certificate: of a slot, or without hosts of the authority."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FIRST)
        .not_valid_after(last)
        .add_extension(x509.BasicConstraints(ca=not hosts, path_length=None if hosts else 0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(by, hashes.SHA256())


def _context(role: int, chain: str, authority: x509.Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(role)  # one for a client checks the host name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(chain)
    context.load_verify_locations(cadata=authority.public_bytes(Encoding.PEM).decode())
    if role == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nothing is sent that nobody waits for
    return context


@contextmanager
def _chain_file(private: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> Iterator[str]:
    """Write what the ssl module reads from files only, for as long as it reads."""
    with tempfile.NamedTemporaryFile("w", prefix="noloco-") as file:  # of mode 0600
        file.write(_pem(private) + certificate.public_bytes(Encoding.PEM).decode())
        file.flush()
        yield file.name


def _private_in(text: str) -> ec.EllipticCurvePrivateKey:
    private = load_pem_private_key(text.encode(), None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ValueError("no key of a federation")
    return private


def _folder_key_in(text: str) -> bytes:
    key = base64.b64decode(text.partition(_BEGIN_FOLDER_KEY)[2].partition(_END_FOLDER_KEY)[0])
    if len(key) != 32:
        raise ValueError("no folder key")
    return key


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=None, info=b"megatron_noloco " + purpose).derive(secret)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _pem(private: ec.EllipticCurvePrivateKey) -> str:
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _der(private: ec.EllipticCurvePrivateKey) -> bytes:
    return private.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())


class Seal:
    """Encrypts content so that it is good at one place only."""

    def __init__(self, key: bytes) -> None:
        self._key_of_names = hmac.digest(key, b"names", "sha256")
        self._cipher = AESGCM(key)

    def close(self, place: str, content: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + bytes(self._cipher.encrypt(nonce, content, place.encode()))

    def open(self, place: str, sealed: bytes) -> bytes:
        """Return what was sealed for a place; raises ValueError for anything else."""
        try:
            return bytes(self._cipher.decrypt(sealed[:12], memoryview(sealed)[12:], place.encode()))
        except InvalidTag:
            raise ValueError("was not sealed with this key for this place") from None

    def mac(self, *texts: str) -> str:
        """Return 32 characters that follow from texts without line ends, and the key."""
        return hmac.digest(self._key_of_names, "\n".join(texts).encode(), "sha256").hex()[:32]
