"""Before a run: does it fit, what will it cost, is this machine ready."""
