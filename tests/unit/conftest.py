"""None of these tests judges how long it takes, so a busy machine fails none.

Hypothesis draws the same cases in each run; HYPOTHESIS_PROFILE=explore draws new ones. A test that is a coroutine
runs in a loop whose clock jumps, but with the mark `real_clock`.
"""

import asyncio
import inspect
import os

import pytest
from hypothesis import settings

from tests.unit.nodes import run

settings.register_profile("explore", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    start = asyncio.run if pyfuncitem.get_closest_marker("real_clock") else run
    start(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True
