"""Run a row of PipeDream's tables on the testbed: our plan, the published configuration, and data
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.configs.__main__ import profile_of_row
from benchmarks.published.configs.fixed import best_cuts
from benchmarks.published.configs.rows import Row
from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.emulate import LINK_BYTES_PER_S, Emulated, emulate, fitting_scale
from benchmarks.testbed.measure import data_parallel_run, described, run_plan, train_s
from benchmarks.testbed.predict import given_plan
from planner.cost.layer_costs import LayerCosts
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.solver import search_plan as solve


@dataclass(frozen=True)
class Ran:
    """Results of one row; speed-ups are measured.

    Attributes:
        bandwidth_bytes_per_s: of the slowest link of the emulated cluster.
        config: of our plan.
        over_one: speed-up of our plan over one device.
        data_parallel_over_one: of DistributedDataParallel.
        theirs_over_one: of the published configuration with the best cuts, if it ran.
        communication_cut: share of data parallelism's bytes that our plan does not send, as
            counted.
        predicted_over_measured: ratio of seconds per minibatch of our plan.
    """

    bandwidth_bytes_per_s: float
    config: str
    over_one: float
    data_parallel_over_one: float
    theirs_over_one: float | None
    communication_cut: float | None
    predicted_over_measured: float

    @property
    def over_data_parallel(self) -> float:
        """Speed-up of our plan."""
        return self.over_one / self.data_parallel_over_one

    @property
    def theirs_over_data_parallel(self) -> float | None:
        """Speed-up of the published configuration."""
        return (
            None
            if self.theirs_over_one is None
            else self.theirs_over_one / self.data_parallel_over_one
        )


def emulated_row(
    bed: Testbed, row: Row, bandwidth_bytes_per_s: float | None, folder: Path
) -> tuple[Emulated, Cluster]:
    """Emulate the row's model on its GPU, and measure the links of the hosts.

    Args:
        bed: at least as many hosts as the row has GPUs.
        row: of the table.
        bandwidth_bytes_per_s: of the slowest links, the others in proportion; None for nominal.
        folder: for the emulated model.
    """
    there = row.site.cluster(row.servers, None)
    if bandwidth_bytes_per_s is not None:
        factor = bandwidth_bytes_per_s / there.slowest_bandwidth_bytes_per_s
        there = row.site.cluster(row.servers, None, factor)
    profile = profile_of_row(row)
    # With two levels the inner links are ten times as fast, because this machine has to carry those
    # bytes as well.
    scale = fitting_scale(profile, there, LINK_BYTES_PER_S / len(there.levels))
    return emulate(profile, scale, folder), bed.links(
        scale.cluster(there), byte_factor=scale.byte_factor
    )


def run_row(
    bed: Testbed,
    row: Row,
    bandwidth_bytes_per_s: float | None,
    seconds: float,
    folder: Path,
    *,
    theirs: bool,
) -> Ran:
    """Solve for the measured links; run our plan, data parallelism and, with `theirs`, the
    published plan.
    """
    emulated, links = emulated_row(bed, row, bandwidth_bytes_per_s, folder)
    with scaled_buckets(emulated.scale.byte_factor):
        plan = solve(emulated.profile, links)
    one_s = whole_s(emulated.profile)
    run = run_plan(bed, emulated, plan, described(links), seconds)
    bsp = data_parallel_run(bed, emulated, links, seconds)
    published = (
        published_plan(emulated.profile, links, row)
        if theirs and plan.replicas != row.replicas
        else None
    )
    nominal = row.site.cluster(row.servers, None).slowest_bandwidth_bytes_per_s
    return Ran(
        bandwidth_bytes_per_s=bandwidth_bytes_per_s or nominal,
        config=plan.config,
        over_one=one_s / run.measured_s,
        data_parallel_over_one=one_s / bsp.measured_s,
        theirs_over_one=None
        if published is None
        else one_s / train_s(bed, emulated, published, seconds),
        communication_cut=plan.predicted.communication_cut,
        predicted_over_measured=run.predicted_s / run.measured_s,
    )


def published_plan(profile: Profile, links: Cluster, row: Row) -> Plan | None:
    """Return the published configuration with the best cuts found; None where the model has too few
    layers.
    """
    cuts = best_cuts(LayerCosts(profile), links, row.replicas)
    return None if cuts is None else given_plan(profile, links, cuts.layers, row.replicas)


def whole_s(profile: Profile) -> float:
    """Return the seconds of a minibatch on one device."""
    return sum(layer.forward_s + layer.backward_s + layer.update_s for layer in profile.layers)
