"""Other projects' programs that our benchmarks run beside ours, each with the Python of an environment of its own."""
