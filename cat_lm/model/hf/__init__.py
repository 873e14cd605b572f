"""Configurations and models as classes of transformers, and what only those need."""
