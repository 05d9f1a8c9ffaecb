"""Everything Hugging Face: folders read and written, the check of an export, text, evaluation by a whole model."""
