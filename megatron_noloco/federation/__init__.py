"""Replicas as separate jobs: who is there, messages between them, rounds that both or neither count."""
