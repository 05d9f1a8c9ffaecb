"""The run: the loop, evaluation, and what is written down about it."""
