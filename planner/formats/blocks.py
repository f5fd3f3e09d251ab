"""Blocks of a profile: the elements of the model's lists of modules."""

from __future__ import annotations

import re
from itertools import groupby

from planner.formats.profile import Profile

# "model.layers.3.mlp.up_proj" belongs to "model.layers.3": the outermost element of a list of modules.
BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


def blocks_of(profile: Profile) -> list[range]:
    """Divide the layers into the model's blocks, by position: the elements of its lists of modules.

    Layers between two blocks belong to the earlier one, and those before the first block to the first. So an embedding
    runs with the first block and the head with the last, as in most training frameworks. A model without lists is a
    single block.
    """
    keys: list[str | None] = []
    for layer in profile.layers:
        found = BLOCK.match(layer.name)
        keys.append(found[0] if found else (keys[-1] if keys else None))
    first = next((key for key in keys if key is not None), None)
    ends, blocks = 0, []
    for _, group in groupby(first if key is None else key for key in keys):
        start, ends = ends, ends + len(list(group))
        blocks.append(range(start, ends))
    return blocks
