"""`python -m launch.doctor`: check a machine, and whether a run can train on it."""
