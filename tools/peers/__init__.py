"""The same work with other programs, side by side: `python -m tools.peers --help`."""
