"""No test cuts the power, so nothing is written through to the disk: that takes milliseconds for each file."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Also for the ranks that are forked from the process of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
