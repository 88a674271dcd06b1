"""`blockyard bench`: what is sent, how it is sent, what is measured of it, and how that is shown.

Pure: lengths.py, requests.py, conversations.py, mooncake.py, plans.py, spelling.py, measures.py, summaries.py and
report.py. With a clock: targets.py asks a cluster or a server, traffic.py sends one plan, trials.py several.
"""
