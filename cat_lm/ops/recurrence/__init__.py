"""Recurrences along time: a state that decays (`decaying_scan`), and the delta rule.

Imports no torch.
"""

CHUNK = 64  # number of steps that the delta rule solves together
EVERY = 16  # number of steps between stored states of the scan

# The rank of the gates of GLA's keys.
GLA_LOW_RANK = 16
