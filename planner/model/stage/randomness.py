"""Random numbers that do not depend on how the model is split: seeded per minibatch, microbatch and layer."""

from __future__ import annotations

import torch
from torch import fx, nn

_MASK = (1 << 64) - 1


class RandomKey:
    """What the random numbers of a forward are a function of, besides the layer."""

    def __init__(self) -> None:
        self._state: int | None = None

    def set(self, seed: int, minibatch: int, microbatch: int) -> None:
        """Use these from now on."""
        self._state = _mix(_mix(_mix(seed) ^ minibatch) ^ microbatch)

    def seed_of(self, layer: int) -> int | None:
        """The generator's seed for a layer, below 2^63; None when no key was set."""
        return None if self._state is None else _mix(self._state ^ layer) >> 1


def seed_of_number(seed: int, number: int) -> int:
    """A seed below 2^63 for the `number`-th of many independent draws."""
    return _mix(_mix(seed) ^ number) >> 1


def reseed(key: RandomKey, device: torch.device, layer: int) -> None:
    """Seed the default generator of `device` for a layer."""
    seed = key.seed_of(layer)
    if seed is None:
        return
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def is_random(node: fx.Node, module: nn.Module) -> bool:
    """Whether an operation draws random numbers; operations that only may (dropout of probability 0) count."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    nested = [
        graph
        for argument in node.all_input_nodes
        if argument.op == "get_attr"
        and isinstance(graph := getattr(module, str(argument.target), None), fx.GraphModule)
    ]
    return any(is_random(inner, graph) for graph in nested for inner in graph.graph.nodes)


def _mix(number: int) -> int:
    """A bijection of 64 bits in which every bit of the input reaches every bit of the output (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
