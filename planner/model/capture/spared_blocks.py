"""Leave equal blocks of a large mixture out of a model before it is captured.

Capture runs each block, and takes about a second of a processor for each block of a mixture. Blocks
whose modules are equal, perhaps in turn, do the same, so few of them tell what all cost.

    blocks    0d 1a 2b 3a 4b 5a 6b 7a 8b 9a
    captured  0d 1a 2b 3a 4b 5a          9a     4b stands for 6b and 8b, 5a for 7a

What a forward does with a block's number is not seen here. So the graph is not that of the model:
it tells costs, and no training has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

FEWEST_BLOCKS = 33  # of a mixture whose blocks are spared: fewer are captured in time
_LEAD = 3  # equal blocks before those that stand for others: the first two may do more
_LONGEST_TURN = 6  # as in `abridged`
_STACKED = 3  # dimensions of the matrices of all experts
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class SparedBlocks:
    """Which blocks of a list were left out.

    Attributes:
        path: name of the list in the model, "model.layers".
        blocks: how many there are in all.
        start: the number of the first one that was left out.
        count: how many were left out, whole turns.
        turn: after how many the blocks repeat.
    """

    path: str
    blocks: int
    start: int
    count: int
    turn: int

    def kept_as(self, number: int) -> int:
        """Return the number that a block has in the shorter list, or the one that stands for it."""
        if number < self.start:
            return number
        if number >= self.start + self.count:
            return number - self.count
        return self.start - self.turn + (number - self.start) % self.turn

    def was_spared(self, number: int) -> bool:
        """Return whether a block was left out."""
        return self.start <= number < self.start + self.count


def spare_blocks(model: nn.Module) -> SparedBlocks | None:
    """Leave out blocks of the model's list of many blocks with experts; return which, or None where
    there is no such list, or its blocks are not equal.
    """
    for path, blocks in model.named_modules():
        if not isinstance(blocks, nn.ModuleList) or len(blocks) < FEWEST_BLOCKS:
            continue
        if not _has_experts(blocks) or _share_weights(model, blocks):
            continue
        places = _places(blocks)
        found = _spared(path, [_facts(block, places) for block in blocks])
        if found is not None:
            kept = [block for number, block in enumerate(blocks) if not found.was_spared(number)]
            model.set_submodule(path, nn.ModuleList(kept))
            return found

    return None


def _spared(path: str, facts: list[object]) -> SparedBlocks | None:
    """Return which blocks the shortest turn spares; None where that is none."""
    count = len(facts)
    for turn in range(1, _LONGEST_TURN + 1):
        # The first blocks may differ, as those without experts do.
        first = count - turn
        while first > 0 and facts[first - 1] == facts[first - 1 + turn]:
            first -= 1
        start = first + _LEAD + turn
        spared = (count - 1 - start) // turn * turn
        if spared > 0:
            return SparedBlocks(path, count, start, spared, turn)

    return None


def _places(blocks: nn.ModuleList) -> set[tuple[str, str]]:
    """Return the attributes of modules that are the block's number, in all blocks that have them:
    an equal number alone may be a size.
    """
    are_places: dict[tuple[str, str], list[bool]] = {}
    for number, block in enumerate(blocks):
        for path, module in block.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    are_places.setdefault((path, name), []).append(value == number)
    return {key for key, found in are_places.items() if len(found) > 1 and all(found)}


def _facts(block: nn.Module, places: set[tuple[str, str]]) -> object:
    """Return all that is seen of a block but its own number."""
    return [
        (
            name,
            type(module),
            _attributes(name, module, places),
            [
                (own, tuple(each.shape), each.dtype, each.requires_grad)
                for own, each in (
                    *module.named_parameters(recurse=False),
                    *module.named_buffers(recurse=False),
                )
            ],
        )
        for name, module in block.named_modules()
    ]


def _attributes(
    path: str, module: nn.Module, places: set[tuple[str, str]]
) -> list[tuple[str, object]]:
    """Return the numbers, words and functions that a module has, and of other objects their
    type.
    """
    return [
        (name, _plain(value))
        for name, value in sorted(vars(module).items())
        if name not in _OF_EVERY_MODULE and (path, name) not in places
    ]


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def _plain(value: Any) -> object:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), [_plain(each) for each in value]
    if isinstance(value, FunctionType):
        return value.__module__, value.__qualname__
    return type(value)


def _has_experts(blocks: nn.ModuleList) -> bool:
    return any(weight.dim() == _STACKED for weight in blocks[-1].parameters())


def _share_weights(model: nn.Module, blocks: nn.ModuleList) -> bool:
    """Return whether a weight of a block is one of another block, too, or of the rest."""
    names = [id(weight) for weight in _weights(model)]
    inside = {id(weight) for weight in _weights(blocks)}
    return sum(name in inside for name in names) > len(inside)


def _weights(module: nn.Module) -> Iterator[object]:
    for _, weight in module.named_parameters(remove_duplicate=False):
        yield weight
    for _, buffer in module.named_buffers(remove_duplicate=False):
        yield buffer
