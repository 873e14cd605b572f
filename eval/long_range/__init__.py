"""Long-range tasks: what models learn from inputs of hundreds to thousands of positions."""
