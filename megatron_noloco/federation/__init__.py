"""Replicas as separate jobs: how they find each other, exchange over ZeroMQ, agree on a round, and take over state."""
