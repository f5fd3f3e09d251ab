"""Channels-last memory format: the channels of a pixel lie together in memory, which many kernels prefer.

PyTorch keeps the order of the dimensions and changes the strides. The model computes the same up to the order of sums,
and its results take over the format of inputs and weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# By the number of dimensions: samples, channels, and two or three of space.
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(tensor: Tensor) -> Tensor:
    """Return `tensor` with its channels innermost in memory; itself if they are, or if it has no channels."""
    memory_format = _FORMATS.get(tensor.dim())
    return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)


def lay_out(module: nn.Module) -> None:
    """Put the weights of `module` into channels-last format, in place: parameters stay the same objects.

    Unlike `module.to(memory_format=torch.channels_last)`, this covers weights of four and of five dimensions.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() in _FORMATS:
            tensor.data = channels_last(tensor.data)
