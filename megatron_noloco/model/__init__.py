"""The model: families with their tables of parameters, and the stage that Megatron-core builds.

Nothing here imports megatron.training, which has global arguments. This file imports no torch, so that `families`
can be used without.
"""
