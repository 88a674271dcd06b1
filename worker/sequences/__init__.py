"""Values that the whole engine shares: identifiers, sampling parameters, sequences, beams and step plans.

Pure data. Does not own any decision about them (../scheduling/).
"""
