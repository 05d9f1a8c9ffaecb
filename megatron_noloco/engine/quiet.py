"""DeepSpeed talks at length, by logging and by print, on every rank."""

import contextlib
import logging
import os
from collections.abc import Iterator

from deepspeed.utils import logger


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, DeepSpeed prints errors only; afterwards its logger is as before."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        logger.setLevel(level)
