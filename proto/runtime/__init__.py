"""The runtime of every process: settings, logs, tasks, signals, garbage collection, and the grace period of a drain."""
