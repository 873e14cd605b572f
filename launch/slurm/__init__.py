"""Run trainings and data preparation on a SLURM cluster: `python -m launch.slurm COMMAND`."""
