"""Scripts that measure; `benchmarks.gpu` is the one command for a GPU machine."""
