"""The fewest bytes that a convolution can move: each tensor once a pass, in or out.

A forward pass reads its inputs and filters and writes its outputs. A backward pass comes later,
when nothing is left in a cache: it reads the outputs' gradients, the filters, and for the filters'
gradients the inputs again, and writes the gradients of inputs and filters. These bytes over the
time taken, against the bandwidth of a plain copy, say how near to the floor a kernel is.
"""

from __future__ import annotations


def forward_bytes(inputs: int, outputs: int, constants: int) -> int:
    """Bytes of a forward pass.

    Args:
        inputs: bytes of what is convolved.
        outputs: bytes of the results.
        constants: bytes of filters, bias and rotary angles.
    """
    return inputs + constants + outputs


def forward_backward_bytes(inputs: int, outputs: int, constants: int, learned: int) -> int:
    """Bytes of a forward and a backward pass; `learned` bytes of the constants get a gradient."""
    backward = outputs + inputs + constants + inputs + learned
    return forward_bytes(inputs, outputs, constants) + backward
