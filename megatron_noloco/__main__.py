"""The entrance: `python -m megatron_noloco`, and the command `megatron-noloco`."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C during the imports ends this process without a traceback

from megatron_noloco.cli.main import run

if __name__ == "__main__":
    run()
