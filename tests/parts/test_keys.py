"""Key files and member files: who may read them, what is refused, and what an identity proves."""

import datetime
import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from megatron_noloco.federation.keys import ANY_MEMBER, VISITOR, Identity, Keys, host_name

HOUR = 3600.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys.make(tmp_path_factory.mktemp("keys") / "key")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys.make(tmp_path_factory.mktemp("strangers") / "key")


def member_of(keys: Keys, folder: Path, slot: int, ends: float) -> Keys:
    (folder / "member").write_text(keys.member_file(slot, ends))
    return Keys.read(folder / "member")


def test_keys_are_written_once_and_for_the_owner_only(tmp_path: Path) -> None:
    made = Keys.make(tmp_path / "key")
    written = (tmp_path / "key").read_bytes()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Keys.make(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == written
    assert made.can_invite
    assert made.slot is None


def certificate_of(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, signer: Any
) -> x509.Certificate:
    """Return a certificate of no authority, for ever."""
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(signer, hashes.SHA256())
    )


def key_of_version_0_4() -> str:
    """Return a key whose certificate is no authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "megatron_noloco federation")])
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return (private + certificate_of(name, name, key, key).public_bytes(Encoding.PEM)).decode()


BEGIN = "-----BEGIN "


def test_a_file_without_a_key_is_refused_in_one_line(keys: Keys, tmp_path: Path) -> None:
    """Half a key has either what only others may know, or what only the owner does."""
    for name in ("one", "other"):
        Keys.make(tmp_path / name)
    (private, certificate), (_, another) = (
        (tmp_path / name).read_text().split(f"{BEGIN}CERT") for name in ("one", "other")
    )
    member = keys.member_file(7, time.time() + HOUR)
    contents = {
        "nothing": "",
        "JSON": '{"public": "a", "secret": "b"}',
        "a line": f"{BEGIN}CERTIFICATE-----\n",
        "of version 0.4": key_of_version_0_4(),
        "the private half": private,
        "the public half": f"{BEGIN}CERT{certificate}",
        "halves of two": f"{private}{BEGIN}CERT{another}",
        "a member without its folder key": member.replace(f"{BEGIN}NOLOCO FOLDER", f"{BEGIN}NOTHING"),
        "a member without its private key": member.replace(f"{BEGIN}PRIVATE", f"{BEGIN}NOTHING"),
    }
    for what, content in contents.items():
        (tmp_path / what).write_text(content)
        line = "holds no key of this version; `megatron-noloco keys FILE` makes a new one"
        with pytest.raises(ValueError, match=line):
            Keys.read(tmp_path / what)
    with pytest.raises(ValueError, match=r"federation.key_file: .*: No such file"):
        Keys.read(tmp_path / "no file")


def test_a_member_file_is_its_slot_only_and_cannot_invite(keys: Keys, tmp_path: Path) -> None:
    member = member_of(keys, tmp_path, 7, time.time() + HOUR)
    assert not member.can_invite
    assert member.slot == 7
    identity = member.identity(7)
    assert identity.slot == identity.owner_of(identity.certificate)[0] == 7
    ends = x509.load_der_x509_certificate(identity.certificate).not_valid_after_utc.timestamp()
    assert abs(ends - time.time() - HOUR) < 60
    assert identity.folder_key == keys.identity(1).folder_key
    with pytest.raises(ValueError, match="is the member file of replica 7, and cannot run replica 8"):
        member.identity(8)
    with pytest.raises(ValueError, match="is a member file, and cannot invite"):
        member.member_file(8, time.time() + HOUR)


def test_a_member_file_ends(keys: Keys, tmp_path: Path) -> None:
    member = member_of(keys, tmp_path, 7, time.time() - HOUR)
    with pytest.raises(ValueError, match=r"was good until 20.* UTC; ask for a new one"):
        member.identity(7)


def test_a_signature_is_of_one_slot_and_one_text(keys: Keys, strangers: Keys) -> None:
    one, other = keys.identity(3), keys.identity(5)
    signature = one.sign(b"text")
    for checker in (one, other):
        checker.check(one.certificate, 3, b"text", signature)
    for slot, text, why in ((5, b"text", "slot 3, not by slot 5"), (3, b"another", "wrong signature")):
        with pytest.raises(ValueError, match=why):
            other.check(one.certificate, slot, text, signature)
    stranger = strangers.identity(3)
    with pytest.raises(ValueError, match="a certificate of another key"):
        other.check(stranger.certificate, 3, b"text", stranger.sign(b"text"))
    with pytest.raises(ValueError):
        other.check(b"no certificate", 3, b"text", signature)


def test_a_signature_is_void_once_its_certificate_has_ended(keys: Keys, tmp_path: Path) -> None:
    member = member_of(keys, tmp_path, 7, time.time() - HOUR)
    ended = Identity(member._private, member._certificate, member._authority, member._folder_key)
    with pytest.raises(ValueError, match="time is over"):
        keys.identity(1).check(ended.certificate, 7, b"text", ended.sign(b"text"))


def test_the_authority_and_a_member_cannot_issue_for_others(keys: Keys, tmp_path: Path) -> None:
    checker = keys.identity(1)
    authority = keys._authority.public_bytes(Encoding.DER)
    with pytest.raises(ValueError, match="of no slot"):
        checker.check(authority, 3, b"text", b"")
    member = member_of(keys, tmp_path, 7, time.time() + HOUR)
    forged = ec.generate_private_key(ec.SECP256R1())
    certificate = certificate_of(
        member._certificate.subject, keys._authority.subject, forged, member._private
    )
    with pytest.raises(ValueError, match="another key"):
        checker.check(certificate.public_bytes(Encoding.DER), 8, b"text", b"")


def test_two_members_derive_the_same_secret_and_a_third_another(keys: Keys, strangers: Keys) -> None:
    one, other, third = (keys.identity(slot) for slot in (1, 2, 3))
    secret = one.pair_key(other.certificate)
    assert len(secret) == 32
    assert secret == other.pair_key(one.certificate)
    assert third.pair_key(one.certificate) != secret
    with pytest.raises(ValueError, match="another key"):
        one.pair_key(strangers.identity(2).certificate)


def test_each_process_of_a_key_holder_has_a_key_of_its_own(keys: Keys) -> None:
    assert keys.identity(1).certificate != keys.identity(1).certificate
    assert keys.identity(VISITOR).slot == VISITOR


def handshake(server: Identity, client: Identity, name: str) -> int:
    """Return the slot that the server has seen; raises SSLError where either side refuses."""
    one, other = socket.socketpair()
    seen: list[int | Exception] = []

    def serve() -> None:
        try:
            with server.server.wrap_socket(one, server_side=True) as opened:
                certificate = opened.getpeercert(binary_form=True)
                assert certificate is not None
                seen.append(server.owner_of(certificate)[0])
                opened.sendall(b"x")
        except OSError as error:
            seen.append(error)
            one.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.client.wrap_socket(other, server_hostname=name) as opened:
            assert opened.version() == "TLSv1.3"
            opened.recv(1)
    finally:
        other.close()
        thread.join()
    if isinstance(seen[0], Exception):
        raise seen[0]
    return seen[0]


def test_both_sides_of_a_connection_show_their_slot(keys: Keys, strangers: Keys, tmp_path: Path) -> None:
    server, client = keys.identity(1), keys.identity(2)
    for name in (ANY_MEMBER, host_name(1)):
        assert handshake(server, client, name) == 2
    assert handshake(server, member_of(keys, tmp_path, 7, time.time() + HOUR).identity(7), host_name(1)) == 7
    for pair in ((server, client, host_name(2)), (server, strangers.identity(2), ANY_MEMBER)):
        with pytest.raises(ssl.SSLError):
            handshake(*pair)
    with pytest.raises(ssl.SSLError):
        handshake(strangers.identity(1), client, ANY_MEMBER)


def test_no_private_key_stays_in_a_temporary_file(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    keys.identity(1)
    assert os.listdir(tmp_path) == []
