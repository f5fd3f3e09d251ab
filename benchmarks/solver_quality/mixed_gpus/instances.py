"""Random small models on GPUs of several kinds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.solver_quality.drawn_chain import chain, layer
from planner.formats.cluster import Cluster, DeviceKind, Level
from planner.formats.device_kinds import profile_of_kinds
from planner.formats.profile import Profile
from planner.options.solving import StageRules

NAMES = ("one", "two", "three")
MICROBATCHES = {"1f1b": (1,), "2bw": (4, 6, 8), "1f1b-flush": (3, 4, 8), "gpipe": (3, 4, 8)}


@dataclass(frozen=True)
class Instance:
    """One question to the planner."""

    profile: Profile
    cluster: Cluster
    schedule: str
    microbatches: int
    rules: StageRules


def draw(rng: random.Random, schedule: str, *, levels: bool) -> Instance:
    """Return 2 to 5 layers on 3 to 6 GPUs of 2 or 3 kinds; on two levels, 2 to 4 layers on 2x2
    GPUs.

    On two levels no stage recomputes, because every plan is priced there, one by one.
    """
    model = _model(rng, rng.randint(2, 4 if levels else 5))
    gpus = 4 if levels else rng.randint(3, 6)
    counts = _counts(rng, gpus, rng.choice((2, 2, 3)))
    limited = rng.random() < 0.6
    needed = sum(
        3 * each.weight_bytes + each.optimizer_bytes + each.saved_bytes for each in model.layers
    )
    kinds = tuple(
        DeviceKind(
            name=name,
            count=count,
            speed=rng.choice((1.0, 1.0, 1.7)),
            memory_bytes=int(needed * rng.uniform(0.3, 1.6)) + 1 if limited else None,
        )
        for name, count in zip(NAMES, counts, strict=False)
    )
    bandwidth = 10 ** rng.uniform(-0.5, 2.0)
    sizes = (
        ((2, bandwidth * rng.uniform(1, 20)), (2, bandwidth)) if levels else ((gpus, bandwidth),)
    )
    links = tuple(Level(size=size, bandwidth_bytes_per_s=speed) for size, speed in sizes)
    profiles = {
        kind.name or "": model if number == 0 else _on_another_kind(rng, model)
        for number, kind in enumerate(kinds)
    }
    return Instance(
        profile_of_kinds(profiles),
        Cluster(levels=links, kinds=kinds),
        schedule,
        rng.choice(MICROBATCHES[schedule]),
        StageRules("never") if levels else StageRules(),
    )


def _counts(rng: random.Random, gpus: int, kinds: int) -> list[int]:
    ends = sorted(rng.sample(range(1, gpus), kinds - 1))
    return [end - first for first, end in pairwise((0, *ends, gpus))]


def _model(rng: random.Random, count: int) -> Profile:
    """Return a chain of uneven layers, whose optimizer's state can be divided."""
    layers = []
    for number in range(count):
        forward_s, output_bytes = float(rng.randint(1, 19)), rng.randint(1, 39)
        weight_bytes = rng.randint(0, 59)
        more = {"update_s": 0.05 * weight_bytes, "optimizer_bytes": 2 * weight_bytes}
        saved_bytes = output_bytes + rng.randint(0, 60)
        layers.append(
            layer(
                f"l{number}", forward_s, output_bytes, weight_bytes, saved_bytes=saved_bytes, **more
            )
        )
    return chain(layers, "benchmarks.solver_quality.mixed_gpus", optimizer_elementwise=True)


def _on_another_kind(rng: random.Random, model: Profile) -> Profile:
    """Return the model on a kind of GPU that is better at some layers than at others."""
    pace = rng.uniform(0.5, 3.0)
    layers = []
    for each in model.layers:
        ratio = pace * rng.uniform(0.7, 1.4)
        times = {
            name: getattr(each, name) * ratio for name in ("forward_s", "backward_s", "update_s")
        }
        layers.append(each.model_copy(update=times))
    return model.model_copy(update={"layers": tuple(layers)})
