"""GPipe's Table 2: throughput of K partitions with M microbatches, by formula, by simulation, and
measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import number
from benchmarks.published.gpipe.profiles import amoebanet_profile, transformer_profile
from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.emulate import LINK_BYTES_PER_S, Scale, emulate
from benchmarks.testbed.measure import recomputing, train_s
from benchmarks.testbed.predict import balanced_stages, given_plan, simulated_s
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile

PARTITIONS, MICROBATCHES = (2, 4, 8), (1, 4, 32)
RUN = (2, 4)  # partitions that are run
LINK = 12e9  # bytes/s between GPUs: PCIe 3.0 x16
MINIBATCH_S = 3.0  # of the emulated model on one device

# Huang et al., "GPipe: Easy Scaling with Micro-Batch Pipeline Parallelism", NeurIPS 2019, Table 2
# (TPUs) and Table 3 (GPUs without fast links, M = 32): throughput over that of the slowest setting.
PUBLISHED: Mapping[str, Mapping[int, Sequence[float]]] = {  # by M, then by K
    "amoebanet": {1: (1, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)},
    "transformer": {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)},
}
PUBLISHED_GPU: Mapping[str, Sequence[float]] = {
    "amoebanet": (1, 1.7, 2.7),
    "transformer": (1, 1.8, 3.3),
}


@dataclass(frozen=True)
class Throughput:
    """Seconds per minibatch of one setting; every stage runs its forward twice."""

    seconds: float


def bubble(partitions: int, microbatches: int) -> float:
    """Return the bubble, a device's idle share of the time: (K - 1) / (M + K - 1), section 2.3 of
    the paper.
    """
    return (partitions - 1) / (microbatches + partitions - 1)


def by_formula(partitions: int, microbatches: int) -> float:
    """Return the speed-up over one device for equal stages, if nothing else took time."""
    return partitions * (1 - bubble(partitions, microbatches))


def model_profile(model: str, microbatches: int) -> Profile:
    """Return AmoebaNet-D (18, 256) with 128 images per minibatch, or 48 Transformer layers with 32
    sentences.
    """
    if model == "amoebanet":
        return amoebanet_profile(18, 256, 128 // microbatches)
    return transformer_profile(48, 32 // microbatches)


def setting(profile: Profile, links: Cluster, partitions: int, microbatches: int) -> Plan:
    """Return a plan with partitions of about equal time, as GPipe has."""
    stages = balanced_stages(profile, partitions)
    return recomputing(given_plan(profile, links, stages, (1,) * partitions, "gpipe", microbatches))


def simulate_setting(model: str, partitions: int, microbatches: int) -> Throughput:
    """Simulate a setting on GPUs with unlimited memory."""
    profile = model_profile(model, microbatches)
    return Throughput(
        simulated_s(setting(profile, flat_cluster(partitions, LINK), partitions, microbatches))
    )


def run_setting(
    bed: Testbed,
    profile: Profile,
    partitions: int,
    microbatches: int,
    folder: Path,
    minibatch_s: float = MINIBATCH_S,
) -> Throughput:
    """Run a setting on emulated devices."""
    whole_s = sum(layer.forward_s + layer.backward_s + layer.update_s for layer in profile.layers)
    time_factor = minibatch_s / (microbatches * whole_s)
    scale = Scale(time_factor, LINK_BYTES_PER_S * time_factor / LINK)
    emulated = emulate(profile, scale, folder)
    links = bed.links(scale.cluster(flat_cluster(partitions, LINK)), byte_factor=scale.byte_factor)
    plan = setting(emulated.profile, links, partitions, microbatches)
    # In seconds of the emulated devices, so that settings are comparable.
    return Throughput(train_s(bed, emulated, plan, seconds=2 * minibatch_s) / time_factor)


def key(model: str, partitions: int, microbatches: int) -> str:
    """Return the key of a setting in the results."""
    return f"{model} K={partitions} M={microbatches}"


def tables(simulated: Mapping[str, Throughput], run: Mapping[str, Throughput]) -> str:
    """Return throughput relative to K = 2, M = 1, as for the TPUs; and to K = 2, M = 32, as for the
    GPUs.
    """
    headers = ("model", "K", "M", "bubble", "by the formula", "simulated", "run", "published")
    most, first = MICROBATCHES[-1], (PARTITIONS[0], MICROBATCHES[0])
    on_tpus = [
        [
            *(
                model,
                f"{k}",
                f"{m}",
                f"{bubble(k, m):.0%}",
                number(by_formula(k, m) / by_formula(*first)),
            ),
            *(_over(results, model, (k, m), first) for results in (simulated, run)),
            number(published[m][index]),
        ]
        for model, published in PUBLISHED.items()
        for index, k in enumerate(PARTITIONS)
        for m in MICROBATCHES
    ]
    on_gpus = [
        [
            *(
                model,
                f"{k}",
                f"{most}",
                f"{bubble(k, most):.0%}",
                number(by_formula(k, most) / by_formula(2, most)),
            ),
            *(_over(results, model, (k, most), (2, most)) for results in (simulated, run)),
            number(published[index]),
        ]
        for model, published in PUBLISHED_GPU.items()
        for index, k in enumerate(PARTITIONS)
    ]
    one, other = (
        tabulate(rows, headers, tablefmt="github", disable_numparse=True)
        for rows in (on_tpus, on_gpus)
    )
    return f"{one}\n\nOver K = 2 with M = 32, beside what was published for GPUs:\n\n{other}"


def _over(
    results: Mapping[str, Throughput], model: str, kind: tuple[int, int], base: tuple[int, int]
) -> str:
    this, first = (results.get(key(model, *each)) for each in (kind, base))
    return "" if first is None or this is None else number(first.seconds / this.seconds)
