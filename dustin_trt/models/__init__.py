"""Untouched Hugging Face decoders, run with our attention and our cache."""
