"""Recurrences along time: a state that decays (`decaying_scan`), and the delta rule.

Imports no torch.
"""

CHUNK = 64  # steps that the delta rule solves at once
EVERY = 16  # steps between the states that the scan keeps
# FLOPs for each number of the state and token, forward and backward.
GLA_FLOPS, DELTA_FLOPS, GATED_DELTA_FLOPS = 15, 18, 21

# The rank of the gates of GLA's keys.
GLA_LOW_RANK = 16
