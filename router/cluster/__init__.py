"""State of the workers as this router knows it: streams to them, their load, and the requests booked on each.

Does not own which worker a request gets (../placement/).
"""
