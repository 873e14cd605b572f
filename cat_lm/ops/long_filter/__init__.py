"""Causal convolutions with filters as long as the text, of N numbers of state a head and channel.

    y_t = sum_{j≤t} F_j x_{t−j},   F_j = d δ_j + Re sum_m c_m e^{−j (r_m − i φ_m)}

Such a filter is a linear recurrence: `long_conv` computes it in chunks of L tokens, by a product of
matrices within a chunk and a state between chunks, down to L = 1, a token at a time, as decoding
does. There is no Fourier transform: its rounding would carry the future into the past.

`filters` has the table of filters and imports no torch; `api` has the operators.
"""

# L, the tokens of a chunk: of more, a GPU's program would not fit its registers. On a CPU 64 take a
# tenth less time with N = 16, and 16 or 128 more.
LENGTH = 32
