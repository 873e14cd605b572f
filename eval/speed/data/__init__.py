"""Time tokenization, preparation, the loader and the opening of corpora."""
