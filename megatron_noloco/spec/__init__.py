"""Spec: what a run is, as small frozen values in the terms of the field, made by the config.

No torch, no pydantic, nothing to read or to check: a value that exists is sound.
"""
