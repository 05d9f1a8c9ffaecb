"""The engine: DeepSpeed, whose world is one replica. The only package that runs deepspeed."""
