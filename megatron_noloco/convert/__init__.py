"""Conversion of files of other programs to a config: DeepSpeed, Megatron-LM, torchtitan, Hugging Face."""
