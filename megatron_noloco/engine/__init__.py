"""The engine: DeepSpeed, whose world is one replica. The only room that runs deepspeed."""
