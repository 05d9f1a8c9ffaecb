"""The file by which a run is asked to stop: from every host that sees its folder, under every launcher."""

import time
from pathlib import Path

from megatron_noloco.files import write_text

_NAME = "stop"


def ask_to_stop(output_dir: Path) -> None:
    """The jobs that write there find it at their next look, within some seconds. Raises OSError."""
    write_text(output_dir / _NAME, f"{time.time()}\n")


class StopFile:
    """Whether somebody has asked since this object was made; the file itself stays where it is."""

    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / _NAME
        self._before = self._written()

    def asked(self) -> bool:
        written = self._written()
        return written is not None and written != self._before

    def _written(self) -> int | None:
        """When, in nanoseconds; None where there is no file, or none can be seen."""
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None
