"""Stages in segments: groups of layers that recompute, and the layers between them, which keep their activations.

A group that recomputes keeps the values that enter it, and runs its forward again right before its own backward
(Chen et al. 2016, arXiv 1604.06174, section 3). `torch.utils.checkpoint` sees to both, without a graph of its own: the
backward is that of the first forward, operation by operation, so gradients are the same to the bit. The second forward
reads the buffers that the first one read, such as BatchNorm's statistics, and does not undo what later ones wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.errors import CaptureError
from planner.model.capture.failure import operation_failure
from planner.model.capture.graph import LayerGraph
from planner.model.randomness import RandomKey
from planner.model.stage.parts import Boundary, Segment, boundary_of

FAILURES = (RuntimeError, IndexError, ValueError, TypeError)  # that an operation raises on values it cannot take


def divided(graph: LayerGraph, boundary: Boundary, groups: Sequence[Sequence[str]]) -> list[tuple[Boundary, bool]]:
    """Divide the layers of a stage into segments; for each whether it recomputes.

    Args:
        groups: names of the layers of each group that recomputes.

    Raises:
        CaptureError: when the layers of a group do not follow one another in the stage, or are in two groups.
    """
    segments = []
    start = boundary.first
    for positions, names in sorted((sorted(graph.position.get(name, -1) for name in names), names) for names in groups):
        first, last = positions[0], positions[-1]
        if first < start or last > boundary.last or positions != list(range(first, last + 1)):
            raise CaptureError(
                f"the layers {list(names)}, which are to recompute together, do not follow one another in their stage, "
                "or some are in two groups",
                hint="make the plan again with: plan solve",
            )
        segments += [(start, first - 1, False), (first, last, True)]
        start = last + 1
    segments = [each for each in [*segments, (start, boundary.last, False)] if each[0] <= each[1]]
    if len(segments) == 1:
        return [(boundary, segments[0][2])]
    kept = [node.name for node in boundary.sent]
    return [(boundary_of(graph, first, last, kept), again) for first, last, again in segments]


def joined(segments: Sequence[Segment], takes: Sequence[str], results: Sequence[str]) -> Segment:
    """Return one segment that runs `segments` one after the other.

    Args:
        takes: names of the stage's inputs, received values and numbers.
    """
    if len(segments) == 1:
        return segments[0]
    needed = set(results)
    steps: list[tuple[Segment, list[str]]] = []
    for segment in reversed(segments):
        # What only this segment still needs must not outlive it: activations would take memory until the stage's end.
        steps.append((segment, [name for name in segment.takes if name not in needed]))
        needed.update(segment.takes)
    steps.reverse()

    def run(device: torch.device, key: RandomKey, observer: Any, *values: Any) -> tuple[Tensor, ...]:
        known = dict(zip(takes, values, strict=True))
        for segment, last_used in steps:
            taken = [known[name] for name in segment.takes]
            for name in last_used:
                del known[name]
            known.update(zip(segment.makes, segment.run(device, key, observer, *taken), strict=True))
        return tuple(known[name] for name in results)

    return Segment(run, tuple(takes), tuple(results))


def recomputing(segment: Segment, buffers: Sequence[Place], places: Mapping[str, str]) -> Segment:
    """Return a segment that keeps only what it takes, and runs again before its backward.

    Args:
        buffers: that it writes.
        places: where the user's file makes each value of the code.
    """

    def run(device: torch.device, key: RandomKey, observer: Any, *values: Any) -> tuple[Tensor, ...]:
        # The stage's key will have been set for other units when the forward runs again.
        forward = partial(segment.run, device, key.copy(), observer)
        if not torch.is_grad_enabled():
            return forward(*values)
        before: Buffers = []  # of the first forward, once it runs
        has_run = False

        def forward_twice(*values: Any) -> tuple[Tensor, ...]:
            nonlocal before, has_run
            if not has_run:
                before, has_run = _copies(buffers), True
                return forward(*values)
            with _replaced(before):
                try:
                    return forward(*values)
                except FAILURES as cause:
                    # Not within the stage's forward, which says so of the first one.
                    failure = operation_failure(cause, places)
                    if failure is None:
                        raise
                    raise failure from cause

        made: tuple[Tensor, ...] = checkpoint(
            forward_twice,
            *values,
            use_reentrant=False,
            preserve_rng_state=False,  # each layer that draws random numbers seeds the generator by the key first
            early_stop=False,  # predictions count a whole forward
        )
        return made

    return replace(segment, run=run)


class Place(NamedTuple):
    """Where code looks a buffer up; modules replace the entries of their registries, but never a registry itself."""

    registry: dict[str, Tensor | None]
    name: str


Buffers = Sequence[tuple[Place, Tensor]]


def places_of(weights: nn.Module, names: Set[str]) -> list[Place]:
    """Return where the tree at `weights` has the buffers called `names`, and those of the modules called so.

    Each buffer counts under all its names.
    """
    found = [
        (path, f"{path}.{name}" if path else name, Place(module._buffers, name), buffer)
        for path, module in weights.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    wanted = {id(buffer) for path, name, _, buffer in found if path in names or name in names}
    return [place for _, _, place, buffer in found if id(buffer) in wanted]


def _copies(places: Sequence[Place]) -> Buffers:
    """Return copies of the buffers; one for a buffer that has several names."""
    made: dict[int, Tensor] = {}
    for registry, name in places:
        value = registry[name]
        assert value is not None
        if id(value) not in made:
            made[id(value)] = value.detach().clone()
    return [(place, made[id(place.registry[place.name])]) for place in places]


@contextmanager
def _replaced(before: Buffers) -> Iterator[None]:
    """Let a second forward read and write `before` in place of the buffers."""
    now = [(place, place.registry[place.name]) for place, _ in before]
    for (registry, name), value in before:
        registry[name] = value
    try:
        yield
    finally:
        for (registry, name), current in now:
            registry[name] = current
