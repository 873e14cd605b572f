"""Evaluation commands; they run from the checkout and are not installed."""
