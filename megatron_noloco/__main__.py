"""The entrance: `python -m megatron_noloco`, and the command `megatron-noloco`."""

from megatron_noloco.cli.main import run

if __name__ == "__main__":
    run()
