"""The runtime of every process: logs, signals, garbage collection, and the grace period of a drain."""
