"""GPipe's Table 1: compute the memory of the published models, and the largest models that fit by
our memory model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tabulate import tabulate

from benchmarks.published.gpipe.profiles import (
    amoebanet_profile,
    parameters_of,
    transformer_profile,
)
from planner.cost.candidate import Candidate, StageOptions, whole_stage
from planner.cost.layer_costs import LayerCosts
from planner.cost.overheads import stage_memory
from planner.cost.work import Integers
from planner.formats.plan_parts import StageMemory
from planner.formats.profile import Profile
from planner.solver.problem.states import Chain

MICROBATCHES = 32
IMAGES, SENTENCES = 128, 32  # per minibatch
AMOEBANET_BYTES, TRANSFORMER_BYTES = 8 * 2**30, 16 * 2**30  # of a device
BLOCKS = 40  # Transformer layers; three devices hold fewer


@dataclass(frozen=True)
class Published:
    """A column of the table: the largest model that fits on `partitions` devices.

    With `partitions` 0 the model runs without GPipe: no recomputation, no microbatches. `size` is
    (L, D) for AmoebaNet-D, (L,) for Transformer-L.
    """

    partitions: int
    size: tuple[int, ...]
    parameters: str
    parameter_gb: float
    activation_gb: float


# Huang et al., NeurIPS 2019, Table 1.
AMOEBANETS = (
    Published(0, (18, 208), "82M", 1.05, 6.26),
    Published(1, (18, 416), "318M", 3.8, 3.46),
    Published(2, (18, 544), "542M", 6.45, 8.11),
    Published(4, (36, 544), "1.05B", 12.53, 15.21),
    Published(8, (72, 512), "1.8B", 24.62, 26.24),
)
TRANSFORMERS = (
    Published(0, (3,), "282.2M", 11.7, 3.15),
    Published(1, (13,), "785.8M", 8.8, 6.4),
    Published(8, (103,), "5.3B", 59.5, 50.9),
    Published(32, (415,), "21.0B", 235.1, 199.9),
    Published(128, (1663,), "83.9B", 937.9, 796.1),
)


@dataclass(frozen=True)
class Fit:
    """Memory of a model of a published size by our memory model, in bytes.

    Attributes:
        parameters: how many.
        parameter_bytes: parameters and the optimizer's state, over all devices.
        gradient_bytes: over all devices; the published parameter memory excludes them.
        activation_bytes: saved activations, workspace and messages at the peak, over all devices.
        fullest_bytes: all of these on the fullest device.
        samples: per microbatch; without microbatches, the most that fit on a device.
        largest: Transformer layers that fit on as many devices by our memory model; None if not
            computed.
    """

    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    activation_bytes: int
    fullest_bytes: int
    samples: int
    largest: int | None = None


def fit_amoebanet(column: Published) -> Fit:
    """Compute AmoebaNet's memory with the cuts that minimise the fullest device."""
    cells, filters = column.size
    if column.partitions == 0:
        return unsplit(
            lambda samples: amoebanet_profile(cells, filters, samples), AMOEBANET_BYTES, IMAGES
        )
    samples = IMAGES // MICROBATCHES
    profile = amoebanet_profile(cells, filters, samples)
    return _fit(parameters_of(profile), leanest(LayerCosts(profile), column.partitions), samples)


def fit_transformer(column: Published) -> Fit:
    """Compute the Transformer's memory with equal layers per device; embedding on the first, output
    on the last.
    """
    (layers,) = column.size
    samples = SENTENCES // MICROBATCHES
    match column.partitions:
        case 0:
            return unsplit(
                lambda count: transformer_profile(layers, count), TRANSFORMER_BYTES, SENTENCES
            )
        case 1:
            fit = _whole(layers, samples)
            one, two = (_whole(count, samples).fullest_bytes for count in (1, 2))
            largest = 1 + (TRANSFORMER_BYTES - one) // (two - one)
        case count:
            blocks = Blocks(transformer_profile(BLOCKS, samples), BLOCKS)
            each = -(-layers // count)
            middle = [blocks.middle(each)] * (count - 2)
            stages = [blocks.first(each), *middle, blocks.last(layers - each * (count - 1))]
            single = parameters_of(transformer_profile(1, samples))
            of_block = (parameters_of(blocks.layer_costs.profile) - single) // (BLOCKS - 1)
            fit = _fit(single + (layers - 1) * of_block, stages, samples)
            ends = sum(_most(make, TRANSFORMER_BYTES) for make in (blocks.first, blocks.last))
            largest = ends + (count - 2) * _most(blocks.middle, TRANSFORMER_BYTES)
    return Fit(**{**vars(fit), "largest": largest})


class Blocks:
    """Memory of stages by their number of Transformer layers."""

    def __init__(self, profile: Profile, count: int) -> None:
        self.layer_costs = LayerCosts(profile)
        names = [layer.name for layer in profile.layers]
        self.starts = [
            next(k for k, name in enumerate(names) if name.startswith(f"layers.{block}."))
            for block in range(count)
        ]

    def first(self, count: int) -> StageMemory:
        """Return the stage that also has the embedding."""
        return stage(self.layer_costs, 0, self.starts[count])

    def middle(self, count: int) -> StageMemory:
        """Return a stage of layers alone."""
        return stage(self.layer_costs, self.starts[1], self.starts[count + 1])

    def last(self, count: int) -> StageMemory:
        """Return the stage that also has the output and the loss."""
        return stage(self.layer_costs, self.starts[-count], len(self.layer_costs.profile.layers))


def stage(layer_costs: LayerCosts, first: int, end: int) -> StageMemory:
    """Return the memory of layers `first` to `end` - 1 under GPipe, which saves inputs and
    recomputes a microbatch.
    """
    layers = range(first, end)
    candidate = Candidate(
        frozenset(range(first)), frozenset(layers), StageOptions(1, recompute=whole_stage(layers))
    )
    return stage_memory(layer_costs.footprint(candidate).divided(MICROBATCHES), MICROBATCHES, 1)


def leanest(layer_costs: LayerCosts, count: int) -> list[StageMemory]:
    """Return the cuts into `count` stages with the least memory on the fullest, by exact dynamic
    programming.
    """
    space = Chain(layer_costs)
    ends = np.arange(len(space))
    totals = []  # memory of the stage from each layer to every later one
    for start in ends[:-1]:
        later = ends[start + 1 :]
        footprint = (
            space.footprint(start, later, space.work(start, later))
            .recomputed()
            .divided(MICROBATCHES)
        )
        totals.append(footprint.total_bytes(MICROBATCHES, 1))
    fullest = np.where(ends == 0, 0.0, np.inf)
    came: list[Integers] = []
    for _ in range(count):
        least, start_of = np.full(len(ends), np.inf), np.zeros(len(ends), dtype=np.int64)
        for start, total in enumerate(totals):
            reached = np.maximum(fullest[start], total)
            better = reached < least[start + 1 :]
            least[start + 1 :][better] = reached[better]
            start_of[start + 1 :][better] = start
        fullest = least
        came.append(start_of)
    cuts = [len(ends) - 1]
    for start_of in reversed(came):
        cuts.append(int(start_of[cuts[-1]]))
    layers = [len(space.layers(0, cut)) for cut in reversed(cuts)]
    return [stage(layer_costs, first, end) for first, end in pairwise(layers)]


def unsplit(profile_of: Callable[[int], Profile], limit_bytes: int, most: int) -> Fit:
    """Compute the memory without GPipe, with the most samples that fit; with one if none do."""

    def fit(samples: int) -> Fit:
        profile = profile_of(samples)
        every = Candidate(frozenset(), frozenset(range(len(profile.layers))))
        return _fit(
            parameters_of(profile),
            [stage_memory(LayerCosts(profile).footprint(every), 1, 1)],
            samples,
        )

    one, two = fit(1).fullest_bytes, fit(2).fullest_bytes  # bytes grow linearly with the samples
    return fit(min(max(1, 1 + (limit_bytes - one) // (two - one)), most))


def _whole(layers: int, samples: int) -> Fit:
    profile = transformer_profile(layers, samples)
    return _fit(
        parameters_of(profile), [stage(LayerCosts(profile), 0, len(profile.layers))], samples
    )


def _most(make: Callable[[int], StageMemory], limit_bytes: int) -> int:
    """Return the most layers with which a stage fits."""
    return max((n for n in range(1, BLOCKS - 1) if make(n).total_bytes <= limit_bytes), default=0)


def _fit(parameters: int, stages: Sequence[StageMemory], samples: int) -> Fit:
    return Fit(
        parameters=parameters,
        parameter_bytes=sum(memory.weights_bytes + memory.optimizer_bytes for memory in stages),
        gradient_bytes=sum(memory.gradients_bytes for memory in stages),
        activation_bytes=sum(
            memory.activations_bytes + memory.communication_bytes for memory in stages
        ),
        fullest_bytes=max(memory.total_bytes for memory in stages),
        samples=samples,
    )


def key(model: str, column: Published) -> str:
    """Return the key of a column in the results."""
    return f"{model} {column.partitions}"


def tables(fits: Mapping[str, Fit]) -> str:
    """Return published values next to ours: AmoebaNet's in GB, the Transformer's in GiB, as the
    paper's must be.
    """
    headers = [
        "model",
        "devices",
        "size",
        "parameters",
        "with state, published",
        "with state",
        "gradients",
    ]
    headers += [
        "activations, published",
        "activations",
        "fullest device",
        "samples",
        "fits",
        "largest",
    ]
    rows = []
    for model, columns, unit, limit in (
        ("AmoebaNet-D", AMOEBANETS, 1e9, AMOEBANET_BYTES),
        ("Transformer-L", TRANSFORMERS, 2**30, TRANSFORMER_BYTES),
    ):
        for column in columns:
            if (fit := fits.get(key(model, column))) is None:
                continue
            rows.append(
                [
                    model,
                    f"{column.partitions}" if column.partitions else "1, no GPipe",
                    ", ".join(map(str, column.size)),
                    f"{fit.parameters / 1e6:.1f}M ({column.parameters})",
                    f"{column.parameter_gb}",
                    f"{fit.parameter_bytes / unit:.2f}",
                    f"{fit.gradient_bytes / unit:.2f}",
                    f"{column.activation_gb}",
                    f"{fit.activation_bytes / unit:.2f}",
                    f"{fit.fullest_bytes / unit:.2f}",
                    f"{fit.samples}",
                    "yes" if fit.fullest_bytes <= limit else "no",
                    "" if fit.largest is None else f"{fit.largest} ({column.size[0]})",
                ]
            )
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
