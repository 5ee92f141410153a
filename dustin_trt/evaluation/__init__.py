"""The demo, the real model and text it runs on, and pass-key retrieval."""
