"""Replicas as separate jobs: messages between their ranks over ZeroMQ, who is there, how they find each other.

And files that one hands over to another.
"""
