"""Gives the tests a process in which the engines were imported beside the simulated GPU."""

from collections.abc import Iterator

import pytest

from tests.simulated_gpu.process import GpuProcess


@pytest.fixture(scope="session")
def gpu_process() -> Iterator[GpuProcess]:
    process = GpuProcess()
    yield process
    process.close()
