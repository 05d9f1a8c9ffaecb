"""Run a script without DeepSpeed's collectives over shared memory, which it would compile for two minutes."""

import runpy
import sys

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
