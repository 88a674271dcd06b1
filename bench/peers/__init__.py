"""Programs of other projects that our benchmarks run beside ours, each with the Python of its own environment."""
