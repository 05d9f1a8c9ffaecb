"""Many replicas of a small Llama in one process, by the trainer's plans, data, initial weights and outer step."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported: else it guesses, and says so
