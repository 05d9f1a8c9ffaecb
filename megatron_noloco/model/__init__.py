"""The model: tables of model families, and the stage that Megatron-core builds from one.

It never imports megatron.training (global arguments). This file imports no torch, so that `families` needs none.
"""
