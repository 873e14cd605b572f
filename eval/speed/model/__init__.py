"""Time whole models: training steps, decoding, checkpoints."""
