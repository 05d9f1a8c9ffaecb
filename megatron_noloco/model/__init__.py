"""The model: a Llama stage built from Megatron-core, its process groups, and its pipeline schedule.

The only room that imports megatron.core; it never imports megatron.training (global arguments).
"""
