"""What makes the bits: the settings of torch that bear on them, and a fingerprint of what this machine computes. What a
difference means for a run is not decided here but in `protocol/numeric_facts.py`, and no model of anybody's is
known.
"""
