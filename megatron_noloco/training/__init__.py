"""A run: prepared, joined, built from its parts, and trained; rounds and evaluation."""
