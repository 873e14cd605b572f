"""Amounts, locks, progress, workers and the removal of unfinished work, for all steps."""
