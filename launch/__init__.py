"""Set up the environment, check machines, and launch runs on one machine or on SLURM."""

import cat_lm  # noqa: F401 -- must be first: it removes the working directory from the path
