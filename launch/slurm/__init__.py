"""Runs on a SLURM cluster: `python -m launch.slurm COMMAND`; see `--help`."""
