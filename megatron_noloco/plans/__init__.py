"""Computes what ranks must agree on, from seed and counter alone: no torch, no messages."""
