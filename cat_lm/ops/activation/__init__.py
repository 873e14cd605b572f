"""Activations together with what is next to them."""
