"""What every process needs to run: logs, signals, garbage collection, and the grace period of a drain."""
