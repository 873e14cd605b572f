"""Configurations and models as classes of transformers, and their helpers."""
