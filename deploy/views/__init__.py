"""What commands print: tables, summaries, maps and numbers. Pure.

Does not own where the values come from.
"""
