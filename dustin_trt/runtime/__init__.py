"""The decoding loop and what people call."""
