"""The mechanistic suite: associative recall, selective copying, and the theory behind them."""
