"""Plan the figures' grids of runs, and gather what they found."""
