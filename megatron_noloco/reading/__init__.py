"""What a run wrote about itself, read again: live in the terminal, and as a page."""
