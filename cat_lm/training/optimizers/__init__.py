"""Optimizers of this project, a file each: see `cat_lm.optimizers`."""
