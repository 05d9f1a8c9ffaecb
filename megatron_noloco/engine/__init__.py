"""The engine: DeepSpeed, told that one replica is the whole world. The only room that imports deepspeed."""
