"""Train and test the suite's small models, alone, stacked and in parallel."""
