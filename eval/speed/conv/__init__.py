"""Time the convolutions beside torch's and other libraries'."""
