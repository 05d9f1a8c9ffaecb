"""The file of a key: who may read it, and what is refused."""

from pathlib import Path

import pytest

from megatron_noloco.federation.keys import Keys


def test_keys_are_written_once_and_for_the_owner_only(tmp_path: Path) -> None:
    Keys.make(tmp_path / "key")
    written = (tmp_path / "key").read_bytes()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Keys.make(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == written


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "holds no key"),
        ("{}", "holds no key"),
        ("-----BEGIN CERTIFICATE-----\n", "holds no key"),
        ('{"public": "a", "secret": "b"}', "is a key of an earlier version"),
    ],
)
def test_a_file_without_a_key_is_refused_in_one_line(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(ValueError, match=f"{why}; `megatron-noloco keys FILE` makes a new one"):
        Keys.read(tmp_path / "key")
    with pytest.raises(ValueError, match=r"federation.key_file: .*: No such file"):
        Keys.read(tmp_path / "other")


def test_half_a_key_is_none(tmp_path: Path) -> None:
    """Neither what only others may know nor what only the owner does."""
    Keys.make(tmp_path / "key")
    private, certificate = (tmp_path / "key").read_text().split("-----BEGIN CERT")
    for half in (private, "-----BEGIN CERT" + certificate):
        (tmp_path / "half").write_text(half)
        with pytest.raises(ValueError, match="holds no key"):
            Keys.read(tmp_path / "half")
