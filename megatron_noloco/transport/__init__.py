"""Transports: bytes between two ranks, over MPI or torch.distributed."""
