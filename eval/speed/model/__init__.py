"""Time whole models: training steps and decoding."""
