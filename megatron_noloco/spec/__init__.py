"""Spec: what a run is, as small frozen values in the field's terms. The config makes them; other rooms take them.

No torch, no pydantic, nothing to read or to check: a value that exists is sound.
"""
