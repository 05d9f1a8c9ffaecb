"""The command line as a file, for launchers that start files only: DeepSpeed's slurm and mpich."""

from megatron_noloco.cli.main import run

run()
