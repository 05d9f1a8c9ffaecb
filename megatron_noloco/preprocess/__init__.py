"""Preprocessing: text, JSON lines and Parquet to Megatron's indexed datasets."""
