"""Random numbers that do not depend on how the model is split: one seed per minibatch, microbatch and layer."""

from __future__ import annotations

import torch
from torch import fx, nn

from planner.model.capture.names import nested_graph

_MASK = (1 << 64) - 1

# Operations that draw nothing where this argument is zero, nor where they have an argument `train` that is false.
_SHARES = {
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), "p"),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), "dropout"),
    "scaled_dot_product_attention": "dropout_p",
}


class RandomKey:
    """What determines the random numbers of a forward, besides the layer."""

    def __init__(self, state: int | None = None) -> None:
        self._state = state

    @property
    def is_set(self) -> bool:
        """Whether there are such numbers: not while a stage is warmed up, or profiled."""
        return self._state is not None

    def copy(self) -> RandomKey:
        """Return a key that stays as this one is now."""
        return RandomKey(self._state)

    def set(self, seed: int, minibatch: int, microbatch: int) -> None:
        """Use these numbers from now on."""
        self._state = _mix(_mix(_mix(seed) ^ minibatch) ^ microbatch)

    def seed_of(self, layer: int) -> int | None:
        """Return the generator's seed for a layer, below 2^63; None when no key was set."""
        return None if self._state is None else _mix(self._state ^ layer) >> 1


def reseed(key: RandomKey, device: torch.device, layer: int) -> None:
    """Seed the default generator of `device` for a layer."""
    seed = key.seed_of(layer)
    if seed is None:
        return
    if device.type == "cuda":
        with torch.cuda.device(device):  # manual_seed seeds the current device only
            torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def is_random(node: fx.Node, module: nn.Module) -> bool:
    """Return whether an operation draws random numbers; dropout of probability 0 does not."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags and not _draws_nothing(node, node.target)
    graphs = [graph for argument in node.all_input_nodes if (graph := nested_graph(argument, module)) is not None]
    return any(is_random(inner, graph) for graph in graphs for inner in graph.graph.nodes)


def _draws_nothing(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    share = _SHARES.get(target.overloadpacket.__name__.rstrip("_"))
    if share is None:
        return False
    given = {argument.name: argument.default_value for argument in target._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    return given[share] == 0 or given.get("train") is False


def _mix(number: int) -> int:
    """Mix 64 bits one to one, such that every input bit reaches every output bit (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
