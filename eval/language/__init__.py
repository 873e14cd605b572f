"""Language models of one size, trained by `train.py`, measured and compared: see eval/studies."""
