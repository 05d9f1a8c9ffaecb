"""Many replicas of a small Llama in one process, by the trainer's plans, data, initial weights and outer step."""
