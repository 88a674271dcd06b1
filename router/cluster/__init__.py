"""What a router knows of its workers: streams to them, their load, and the requests booked on each.

Does not own which worker a request gets (../placement/).
"""
