"""The causes of bits: torch's settings that affect them, and a fingerprint of this machine's results.

`protocol/numeric_facts.py` decides the consequences of a difference. This package does not depend on the user's model.
"""
