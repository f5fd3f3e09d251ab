"""Channels-last: images lie in memory pixel by pixel, all channels of one together, as many kernels want them.

PyTorch keeps the order of the dimensions and changes the strides: what the model computes is the same up to the order
of sums, and results follow the order of inputs and weights by themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# By the number of dimensions: samples, channels and two or three of space; none of other tensors.
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(tensor: Tensor) -> Tensor:
    """`tensor` with its channels innermost; itself where it lies so already, or has no channels."""
    memory_format = _FORMATS.get(tensor.dim())
    return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)


def lay_out(module: nn.Module) -> None:
    """Lay out the weights of `module` in place, as its `.to(memory_format=torch.channels_last)` does.

    Unlike that, it takes weights of four and of five dimensions. Parameters stay the objects they are.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() in _FORMATS:
            tensor.data = channels_last(tensor.data)
