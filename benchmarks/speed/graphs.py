"""Build profiles of large models: their graphs are the published ones, their costs are invented.

Layers and edges follow the papers. Times and bytes follow the layers' arithmetic at round sizes,
with some noise, so that no two layers are equal. As in PipeDream's published profiles, additions
and concatenations take no time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value

_MULTS_PER_S = 2e12
_MINIBATCH = 32


class _Builder:
    """Collects layers, each known by its number and the shape of its output, (channels, pixels)."""

    def __init__(self, model: str) -> None:
        self.model, self.layers, self.edges = model, list[Layer](), list[Edge]()
        self.shapes: list[tuple[int, int]] = []
        self._random = random.Random(0)

    def add(
        self,
        op: str,
        inputs: Sequence[int],
        channels: int,
        pixels: int,
        mults: float = 0,
        weights: int = 0,
    ) -> int:
        """Add a layer with this many multiplications per sample; additions and the like
        have none.
        """
        name = f"node{len(self.layers) + 1}"
        forward_s = mults * _MINIBATCH / _MULTS_PER_S * self._random.uniform(0.8, 1.2)
        size = 4 * _MINIBATCH * channels * pixels
        self.layers.append(
            Layer(
                name=name,
                op=op,
                forward_s=forward_s,
                backward_s=2 * forward_s,
                update_s=0.0,
                outputs=(Value(name=name, output_bytes=size, gradient_bytes=size),),
                weight_bytes=4 * weights,
                gradient_bytes=4 * weights,
                saved_bytes=size,
            )
        )
        for source in sorted(set(inputs)):
            producer = self.layers[source].name
            self.edges.append(Edge(source=producer, value=producer, target=name))
        self.shapes.append((channels, pixels))
        return len(self.layers) - 1

    def conv(self, source: int, channels: int, pixels: int, kernel: int = 1) -> int:
        """Add a convolution, a normalisation and a ReLU."""
        weights = self.shapes[source][0] * channels * kernel**2
        last = self.add("Conv2d", [source], channels, pixels, weights * pixels, weights)
        last = self.add(
            "BatchNorm2d", [last], channels, pixels, 8 * channels * pixels, 2 * channels
        )
        return self.add("ReLU", [last], channels, pixels, 2 * channels * pixels)

    def separable(self, source: int, channels: int, pixels: int, kernel: int) -> int:
        """Add, twice: ReLU, a convolution per channel, one across channels, normalisation."""
        for _ in range(2):
            before = self.shapes[source][0]
            source = self.add("ReLU", [source], before, pixels, 2 * before * pixels)
            depthwise = before * kernel**2
            source = self.add("Conv2d", [source], before, pixels, 4 * depthwise * pixels, depthwise)
            source = self.add(
                "Conv2d", [source], channels, pixels, before * channels * pixels, before * channels
            )
            source = self.add(
                "BatchNorm2d", [source], channels, pixels, 8 * channels * pixels, 2 * channels
            )
        return source

    def profile(self) -> Profile:
        """Return an imported profile of all layers, which cannot train, so that every cut
        is legal.
        """
        return Profile(
            model=self.model,
            device=Device(kind="unknown", name="imagined"),
            layers=tuple(self.layers),
            edges=tuple(self.edges),
            provenance=Provenance(tool="benchmarks", source="imported"),
        )


def chain(layers: int) -> Profile:
    """Return a chain whose times, weights and activations vary over two orders of magnitude, as in
    real models.

    The total work does not grow with the number of layers: more of them divide the same model.
    """
    net, draw = _Builder(f"chain_{layers}"), random.Random(layers)
    last: list[int] = []
    for _ in range(layers):
        mults = 1e12 / layers * 10 ** draw.uniform(-1, 1)
        channels, weights = (
            int(10 ** draw.uniform(1, 3)),
            int(1e8 / layers * 10 ** draw.uniform(-1, 1)),
        )
        last = [net.add("Conv2d", last, channels, 400, mults / _MINIBATCH, weights)]
    return net.profile()


def nasnet_like(cells: int = 18, channels: int = 168) -> Profile:
    """Return NASNet-A (6 @ 4032) as in Zoph et al., CVPR 2018, figure 4: 18 normal cells, about
    1,250 layers.

    Each cell combines five pairs of branches of the two cells before it; two reduction cells and
    two in the stem halve the image.
    """
    net = _Builder("nasnet_like")
    pixels = 165**2
    before = last = net.conv(
        net.add("Conv2d", [], 96, pixels, 96 * 27 * pixels, 96 * 27), 96, pixels
    )
    width = channels // 4
    for _ in range(2):
        pixels //= 4
        before, last = last, _reduction_cell(net, before, last, width, pixels)
        width *= 2
    for stage in range(3):
        if stage:
            width, pixels = 2 * width, pixels // 4
            before, last = last, _reduction_cell(net, before, last, width, pixels)
        for _ in range(cells // 3):
            before, last = last, _normal_cell(net, before, last, width, pixels)
    last = net.add("AvgPool2d", [last], net.shapes[last][0], 1, net.shapes[last][0] * pixels)
    net.add("Linear", [last], 1000, 1, 1000 * net.shapes[last][0], 1000 * net.shapes[last][0])
    return net.profile()


def _normal_cell(net: _Builder, before: int, last: int, channels: int, pixels: int) -> int:
    before, last = net.conv(before, channels, pixels), net.conv(last, channels, pixels)
    pairs = [
        (net.separable(last, channels, pixels, 3), last),
        (net.separable(before, channels, pixels, 3), net.separable(last, channels, pixels, 5)),
        (net.add("AvgPool2d", [last], channels, pixels, 9 * channels * pixels), before),
        (
            net.add("AvgPool2d", [before], channels, pixels, 9 * channels * pixels),
            net.add("AvgPool2d", [before], channels, pixels, 9 * channels * pixels),
        ),
        (net.separable(before, channels, pixels, 5), net.separable(before, channels, pixels, 3)),
    ]
    sums = [net.add("Add", pair, channels, pixels) for pair in pairs]
    return net.add("Concat", [before, *sums], 6 * channels, pixels)


def _reduction_cell(net: _Builder, before: int, last: int, channels: int, pixels: int) -> int:
    before, last = net.conv(before, channels, pixels), net.conv(last, channels, pixels)
    first = net.add(
        "Add",
        [net.separable(before, channels, pixels, 7), net.separable(last, channels, pixels, 5)],
        channels,
        pixels,
    )
    pooled = net.add("MaxPool2d", [last], channels, pixels, 9 * channels * pixels)
    second = net.add("Add", [pooled, net.separable(before, channels, pixels, 7)], channels, pixels)
    average = net.add("AvgPool2d", [last], channels, pixels, 9 * channels * pixels)
    third = net.add("Add", [average, net.separable(before, channels, pixels, 5)], channels, pixels)
    again = net.add("MaxPool2d", [last], channels, pixels, 9 * channels * pixels)
    fourth = net.add("Add", [again, net.separable(first, channels, pixels, 3)], channels, pixels)
    mean = net.add("AvgPool2d", [first], channels, pixels, 9 * channels * pixels)
    fifth = net.add("Add", [mean, second], channels, pixels)
    return net.add("Concat", [second, third, fourth, fifth], 4 * channels, pixels)
