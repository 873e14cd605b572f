"""Modules of attention's patterns and transforms; unlike their entries, they need torch."""
