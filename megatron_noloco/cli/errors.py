"""Turns the errors of commands into a line or a traceback on stderr, and an exit code."""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from megatron_noloco.job.leaving import FAILURE, GRACE_SECONDS, fail, usage_error

# Names of the modules that each extra installs. `pip install .` alone installs torch and numpy.
_EXTRAS = {
