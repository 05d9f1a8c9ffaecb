"""Hugging Face: import and export of folders, generation, and evaluation of a checkpoint or a folder."""
