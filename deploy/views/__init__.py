"""Output of the commands: tables, summaries, maps and formatted numbers. Pure.

Does not own where the values come from.
"""
