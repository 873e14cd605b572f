"""`python -m launch.doctor`: what a machine has, and whether a run can train on it."""
