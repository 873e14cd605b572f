"""Softmax attention on a CPU."""
