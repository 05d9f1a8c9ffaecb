"""What a file in a shared folder is wrapped in, so that its reader knows that it is whole, and whose it is.

Where the federation has a key, a file is encrypted and authenticated (AES-256-GCM) together with its name. Who
owns the folder can neither read it, nor change it, nor give it another name. Without a key, a checksum of name and
content shows damage, and nothing else.
"""

import os
import zlib
from pathlib import Path
from typing import Protocol

_MARK = b"NL"  # then: which wrapping
_NONCE_BYTES = 12  # drawn; the key is good for 2**32 files
_CHECKSUM_BYTES = 4
MOST_ADDED = 64  # bytes; more than a wrapping adds


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
