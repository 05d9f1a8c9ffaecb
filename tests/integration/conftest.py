"""What integration tests share: jobs of a federation on one machine, which find each other at once."""

from collections.abc import Iterator

import pytest

from megatron_noloco.federation import https_client


@pytest.fixture(scope="session", autouse=True)
def looks_often() -> Iterator[None]:
    """Jobs look for the addresses of others ten times a second, also those forked from this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(https_client, "_LOOK_SECONDS", 0.1)
        yield
