"""What a run will need, before it runs: memory of a rank, bytes and seconds of a round."""
