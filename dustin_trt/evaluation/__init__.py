"""Judging a configuration: retrieval, perplexity, throughput; the real model and text for it."""
