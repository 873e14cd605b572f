"""The parts of `train.py`: ranks, engine, schedule, checkpoints, stop signal, metrics."""
