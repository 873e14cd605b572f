"""Recurrences along time: a state that decays (`decaying_scan`), and the delta rule.

Imports no torch.
"""

CHUNK = 64  # steps that the delta rule solves at once
EVERY = 16  # steps between the states that the scan keeps

# The rank of the gates of GLA's keys.
GLA_LOW_RANK = 16
