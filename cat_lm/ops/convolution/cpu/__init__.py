"""The C++ kernel of the convolutions for CPU tensors."""
