"""Which worker gets a request: policies, scores and rates, as pure functions of a snapshot.

Does not own waiting or booking (../dispatch/), nor what is known of the workers (../cluster/).
"""
