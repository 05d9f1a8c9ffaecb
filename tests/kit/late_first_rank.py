"""The command line on a rank 0 that is slower than the others by far: it is the one that reports mistakes."""

import os
import time

from megatron_noloco.cli.main import run

if __name__ == "__main__":
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK")) == "0":
        time.sleep(2)
    run()
