"""The residual stream of a parallel block: its two norms, and the sum of its branches."""
