"""One line with which a new machine joins a federation."""
