"""The small model of the demo, and the program that trained it."""
