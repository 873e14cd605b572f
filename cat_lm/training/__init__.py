"""What `train.py` is made of: ranks, engine, schedule, checkpoints, stop signal, metrics."""
