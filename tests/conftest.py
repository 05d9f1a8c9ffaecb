"""What all tests share: no writing through to the disk, signals as in a terminal, jobs that look often.

No test judges how long it takes, so a busy machine fails none. Hypothesis draws the same cases in each run;
HYPOTHESIS_PROFILE=explore draws new ones.
"""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("hypothesis"):  # `make gpu-check` has neither this nor aiohttp
    from hypothesis import settings

    settings.register_profile("explore", deadline=None)
    settings.register_profile("same", deadline=None, derandomize=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


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


@pytest.fixture(scope="session", autouse=True)
def looks_often() -> Iterator[None]:
    """Jobs look for the addresses of others ten times a second, also those forked from this process."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("aiohttp"):
            patch.setattr("megatron_noloco.federation.https_client._LOOK_SECONDS", 0.1)
        yield
