"""Encode input files into parts: plan, read, hash, select and tokenize documents."""
