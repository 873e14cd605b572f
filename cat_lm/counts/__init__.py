"""What a model needs: its parameters, operations, memory of training, and decoding state.

Nothing is counted by hand. A model of fake tensors, which have shapes and no memory, computes one
row or micro-batch, with one or two layers of each kind; the numbers of the others are multiples.
"""
