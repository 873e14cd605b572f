"""Speed and memory, measured side by side: convolutions, training steps, decoding."""
