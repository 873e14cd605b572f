"""Evaluate models on tasks of lm-evaluation-harness (`python -m eval.zero_shot`)."""
