"""Landmark attention in trained models: what it reads, what that costs, and when it works."""
