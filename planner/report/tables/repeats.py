"""Write repeated blocks once: "model.layers.0 .. model.layers.15 (16 blocks)", "80 x model.layers.*"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise

from planner.formats.profile import Layer, Profile
from planner.plan.blocks import BLOCK, FEWEST_REPEATS, kind_of, repeated_blocks

SUMMED = ("forward_s", "backward_s", "update_s", "accumulate_s", "weight_bytes", "gradient_bytes", "saved_bytes")


def layer_range(layers: Sequence[str], model: Sequence[str] = ()) -> str:
    """Write the first and the last layer, and how many: "features.0 .. features.9 (10)".

    Blocks of `model`, the names of all layers, that are there as a whole are counted as such.
    """
    if len(layers) == 1:
        return layers[0]
    sizes, here = Counter(map(_block, model)), Counter(map(_block, layers))
    whole = {block for block, count in here.items() if block and 1 < count == sizes[block]}
    if len(whole) < 2:
        return f"{layers[0]} .. {layers[-1]} ({len(layers)})"
    others = sum(_block(name) not in whole for name in layers)
    ends = [block if (block := _block(name)) in whole else name for name in (layers[0], layers[-1])]
    counts = f"{len(whole)} blocks" + (f", {others} layer{'s' * (others > 1)}" if others else "")
    return f"{ends[0]} .. {ends[1]} ({counts})"


def _block(name: str) -> str:
    """Return the block of a layer by its name; empty for none."""
    found = BLOCK.match(name)
    return found[0] if found else ""


def collapsed(profile: Profile) -> list[tuple[int, Layer]]:
    """Return the layers in order, those of adjacent equal blocks once, with how often each occurs.

    Costs of a layer that stands for several are their means.
    """
    layers = profile.layers
    blocks = [block for block in repeated_blocks(profile) if _block(layers[block.start].name)]
    rows: list[tuple[int, Layer]] = []
    end = 0
    for run in _runs(profile, blocks):
        rows += [(1, layer) for layer in layers[end : run[0].start]]
        rows += [(len(run), _mean([layers[block.start + place] for block in run])) for place in range(len(run[0]))]
        end = run[-1].stop
    return rows + [(1, layer) for layer in layers[end:]]


def _runs(profile: Profile, blocks: Sequence[range]) -> list[list[range]]:
    """Return the runs of adjacent equal blocks that are long enough to be worth it."""
    breaks = {block.start for before, block in pairwise(blocks) if before.stop != block.start}

    def key(block: range) -> tuple[int, object]:
        segment = sum(start <= block.start for start in breaks)
        return segment, tuple(map(kind_of, profile.layers[block.start : block.stop]))

    runs = [list(group) for _, group in groupby(blocks, key)]
    return [run for run in runs if len(run) >= FEWEST_REPEATS]


def _mean(layers: Sequence[Layer]) -> Layer:
    """Return a layer that stands for equal ones: its name has a star for the block's number, its costs are means."""
    first, last = _block(layers[0].name), _block(layers[-1].name)
    stem = first[: len(first) - len(first.rsplit(".", 1)[-1])]
    name = f"{stem}*{layers[0].name[len(first) :]}" if last.startswith(stem) else layers[0].name
    means = {each: sum(getattr(layer, each) for layer in layers) / len(layers) for each in SUMMED}
    whole = {each: round(value) if each.endswith("_bytes") else value for each, value in means.items()}
    return layers[0].model_copy(update={"name": name, **whole})
