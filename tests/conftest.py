"""What all tests share: no writing through to the disk, and signals as in a terminal."""

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """No test cuts the power, and it takes milliseconds for each file, also in ranks forked from this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Texts are prepared in a cache of the tests, which all tests of a worker share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_not_ignored() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, and with it all that these tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
