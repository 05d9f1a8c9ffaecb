"""Data: text to tokens to microbatches, each addressed by (step, replica, dp, microbatch)."""
