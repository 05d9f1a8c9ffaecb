"""Spec: what a run is, as small frozen values in the field's terms. The config makes them; the other rooms take them.

No torch, no pydantic, nothing to read or to check: whoever holds a value can rely on it.
"""
