"""What people do with a trained ensemble: one model out of many, in Hugging Face's format, and text out of it."""
