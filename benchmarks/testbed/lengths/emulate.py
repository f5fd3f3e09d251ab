"""Turn a profile of a model whose lengths vary into layers that sleep, and into the profile of
these layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.testbed.emulate import Emulated, Scale, emulated_layers, emulated_profile
from benchmarks.testbed.layers import ELEMENT_BYTES
from benchmarks.testbed.lengths.layers import Block, Run, powers, write_model
from benchmarks.testbed.lengths.sentences import Pair
from planner.formats.profile import Fit, LayerFits, Lengths, Profile
from planner.model.capture.capture import capture_file
from planner.model.spec import load_model_file

Terms = NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """Layers between which no cut is possible, as one: what they cost by terms, and what crosses
    the cut after them.
    """

    forward_s: Terms
    backward_s: Terms
    update_s: float
    weight_bytes: int
    crossing_bytes: Terms

    def __add__(self, other: Link) -> Link:
        return Link(
            self.forward_s + other.forward_s,
            self.backward_s + other.backward_s,
            self.update_s + other.update_s,
            self.weight_bytes + other.weight_bytes,
            other.crossing_bytes,
        )


def _lengths(profile: Profile) -> Lengths:
    assert profile.lengths is not None, "the profile is for one length only"
    return profile.lengths


def chain_of(profile: Profile) -> list[Link]:
    """Return the layers in order, joined where no cut is legal."""
    lengths = _lengths(profile)
    position = {layer.name: index for index, layer in enumerate(profile.layers)}
    last_use: dict[tuple[str, str], int] = {}
    for edge in profile.edges:
        key = edge.source, edge.value
        last_use[key] = max(last_use.get(key, 0), position[edge.target])
    crossing = np.zeros((len(profile.layers), len(powers(1, 1))))
    for layer, fits in zip(profile.layers, lengths.layers, strict=True):
        for value, fit in zip(layer.outputs, fits.outputs, strict=True):
            last = last_use.get((layer.name, value.name), 0)
            crossing[position[layer.name] : last] += value.output_bytes * np.array(fit.shares)
    found: list[Link] = []
    open_link: Link | None = None
    for layer, fits, bytes_after in zip(profile.layers, lengths.layers, crossing, strict=True):
        link = Link(
            layer.forward_s * np.array(fits.forward_s.shares),
            layer.backward_s * np.array(fits.backward_s.shares),
            layer.update_s,
            layer.gradient_bytes,
            bytes_after,
        )
        open_link = link if open_link is None else open_link + link
        if layer.name not in profile.no_cut_after:
            found.append(open_link)
            open_link = None
    return found if open_link is None else [*found, open_link]


def emulate(
    profile: Profile, scale: Scale, samples: Sequence[Pair], order: str, folder: Path
) -> Emulated:
    """Write a model whose times and bytes are scaled, for sentences in some order; see
    `layers.Run`.
    """
    lengths, size = _lengths(profile), profile.microbatch_size or 1
    most = lengths.most[0], lengths.most[1]
    per_element = ELEMENT_BYTES * size * np.array(powers(*most))
    blocks = tuple(
        Block(
            forward_s=tuple(link.forward_s * scale.time_factor),
            backward_s=tuple(link.backward_s * scale.time_factor),
            update_s=link.update_s * scale.time_factor,
            weight_bytes=round(link.weight_bytes * scale.byte_factor),
            elements=_whole(link.crossing_bytes * scale.byte_factor / per_element),
        )
        for link in chain_of(profile)
    )
    run = Run(blocks, (lengths.least[0], lengths.least[1]), most, tuple(samples), order)
    path = write_model(run, folder)
    return Emulated(path, _profile(path, run, size, profile.model), scale, profile)


def _whole(elements: Terms) -> tuple[int, ...]:
    """Round to whole elements per sample, at least one in all."""
    found = [max(0, round(each)) for each in elements]
    return tuple(found) if any(found) else (1, *found[1:])


def _profile(path: Path, run: Run, size: int, name: str) -> Profile:
    """Return the profile that `plan profile` would measure, from the times that the layers are
    given.
    """
    spec = load_model_file(str(path))
    graph = capture_file(spec, spec.example_batch(size))
    times = [(sum(block.forward_s), sum(block.backward_s), block.update_s) for block in run.blocks]
    layers, fits = emulated_layers(graph, size, times), list[LayerFits]()
    for index, layer in enumerate(layers):
        block = run.blocks[index] if index < len(run.blocks) else None
        constant = _fit((1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
        sizes = (
            [0.0] * 6
            if block is None
            else [a * b for a, b in zip(block.elements, powers(*run.most), strict=True)]
        )
        fits.append(
            LayerFits(
                forward_s=_fit(block.forward_s) if block else constant,
                backward_s=_fit(block.backward_s) if block else constant,
                saved_bytes=constant,
                flops=constant,
                outputs=tuple(_fit(sizes) for _ in layer.outputs),
            )
        )
    lengths = Lengths(
        names=("source", "target"),
        least=run.least,
        most=run.most,
        profiled=(),
        layers=tuple(fits),
        samples=tuple(zip(*run.samples, strict=True)),
        order="buckets" if run.order == "buckets" else "random",
    )
    varying = None if run.order == "padded" else lengths
    return emulated_profile(
        name, graph, size, layers, "benchmarks.testbed.lengths", lengths=varying
    )


def _fit(terms: Sequence[float]) -> Fit:
    whole = sum(terms)
    return Fit(shares=tuple(term / whole if whole else 0.0 for term in terms), residual=0.0)
