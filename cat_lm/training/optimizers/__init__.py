"""Optimizers of this project, one per file: see `cat_lm.optimizers`."""
