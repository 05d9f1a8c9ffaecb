"""What ranks must agree on, as pure functions of (seed, counter): no torch, no messages."""
