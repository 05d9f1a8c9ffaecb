"""Plans: everything ranks must agree on, as pure functions of (seed, counter). No torch, no messages."""
