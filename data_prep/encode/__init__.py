"""Input files to parts: reading, hashing, sampling, tokens."""
