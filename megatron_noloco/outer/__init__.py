"""The method: what happens between replicas, once every k local steps. Knows torch and a transport, no engine."""
