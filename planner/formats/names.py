"""Names that users give for devices, backends, cost models and codecs, and what is planned of a
GPU.

Codecs are what activations and their gradients become where they cross from stage to stage; values
without gradients travel as they are. This module imports nothing else, because the command line's
help reads it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

# a kind as PyTorch calls it: "cpu", "cuda" (ROCm, too), "xpu"; `planner.runtime` knows them
DeviceType = str
# whose modules of PyTorch have streams and events; a plug-in adds one of its name
GPU_KINDS = ("cuda", "xpu", "mtia")
PLANNED = 0.95  # of a GPU's memory: fragmentation and what libraries take are not known beforehand
Backend = Literal["gloo", "nccl", "xccl"]  # xccl sends from XPUs

CodecName = Literal["none", "bfloat16", "int8"]
FLOAT_BYTES, HALF_BYTES = 4, 2  # of an element; scales of blocks are floats


@dataclass(frozen=True)
class Codec:
    """How many bytes values take on a link."""

    name: CodecName
    summary: str  # for people
    element_bytes: int = 0  # of an element on the link; 0: the value's own
    # elements that share a scale, because the codec's own range is small; 0: it needs no scale
    block: int = 0

    def size_bytes(self, value_bytes: int, element_bytes: int) -> int:
        """Return the bytes on the link of a value of `value_bytes`; as many where coding makes it
        no smaller.
        """
        if not self.element_bytes:
            return value_bytes
        elements = -(-value_bytes // element_bytes)
        coded = elements * self.element_bytes
        if self.block:
            coded = -(-elements // self.block) * (self.block * self.element_bytes + FLOAT_BYTES)
        return min(value_bytes, coded)


CODECS: dict[CodecName, Codec] = {
    codec.name: codec
    for codec in (
        Codec("none", "as they are"),
        Codec("bfloat16", "rounded to bfloat16", element_bytes=2),
        Codec(
            "int8",
            "rounded to 8 bits, with a scale for every 256 elements",
            element_bytes=1,
            block=256,
        ),
    )
}

EightBits = Literal["fp8", "mxfp8"]  # formats of products of linear layers
StateName = Literal["float32", "bfloat16", "int8"]  # types of an optimizer's moments
OffloadName = Literal["optimizer"]  # what is kept in the memory of the host
StackName = Literal["eager", "compiled", "megatron"]  # what runs a model's operators in estimates
STACKS: tuple[StackName, ...] = get_args(StackName)
