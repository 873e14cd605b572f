"""Cross-entropy of a linear head without the logits of a whole batch."""
