"""`python -m launch.plan`: what a run costs, before it runs."""
