"""Transports: bytes between two ranks, over MPI, torch.distributed or threads of one process."""
