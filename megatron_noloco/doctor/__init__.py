"""Whether a machine is ready to train, and what to put right first."""
