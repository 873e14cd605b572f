"""The tasks of lm-evaluation-harness: which ones, and where their rows come from."""
