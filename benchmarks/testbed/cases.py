"""A run on emulated devices: which model, links and plan, and what was predicted and measured."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.kept import ROOT
from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.emulate import LINK_BYTES_PER_S, emulate, fitting_scale
from benchmarks.testbed.measure import Measured, described, run_plan
from benchmarks.testbed.predict import balanced_stages, given_plan, in_proportion
from planner.formats.cluster import Cluster, hierarchical_cluster
from planner.formats.names import CodecName
from planner.formats.plan import Plan
from planner.formats.profile import Profile, load_profile
from planner.solver import search_plan as solve
from planner.units import parse_bandwidth


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        model: folder in profiles/.
        sizes: devices, or devices per server and servers.
        bandwidths: of the links of the emulated devices, inner to outer.
        config: replicas of stages; None for the solver's plan.
        layers: relative number per stage; None for stages of equal time.
        schedule: of the plan.
        microbatches: per minibatch.
        link_bytes_per_s: of the slowest link of the testbed.
        max_stages: at most so many stages in the solver's plan.
        chunks: stages per worker in the solver's plan, for schedules with several.
        seed: of the cuts that the solver's plan may not use, half of all; None for none.
        compress: what the stages send.
    """

    model: str
    sizes: tuple[int, ...]
    bandwidths: tuple[str, ...]
    config: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    microbatches: int = 1
    link_bytes_per_s: float = LINK_BYTES_PER_S
    layers: tuple[float, ...] | None = None
    max_stages: int | None = None
    chunks: int = 1
    seed: int | None = None
    compress: CodecName = "none"

    def given(self, **changes: Any) -> Case:
        """Return the case with other values."""
        return replace(self, **changes)


def run_case(
    bed: Testbed, case: Case, seconds: float, folder: Path, message_bytes: int | None = None
) -> Measured:
    """Emulate the case's model in `folder`, and train a plan for about `seconds` after the
    start-up.

    `message_bytes`: of messages that the links are measured with, as in `Testbed.links`.

    Raises:
        PlannerError: where there is no plan, or it cannot be trained.
    """
    profile = load_profile(ROOT / "profiles" / case.model / "cpu.json")
    there = hierarchical_cluster(case.sizes, [parse_bandwidth(rate) for rate in case.bandwidths])
    scale = fitting_scale(profile, there, case.link_bytes_per_s)
    emulated = emulate(profile, scale, folder)
    links = bed.links(scale.cluster(there), message_bytes, scale.byte_factor)
    links = links.model_copy(update={"compress": case.compress})
    with scaled_buckets(scale.byte_factor):
        plan = plan_of(case, emulated.profile, links)
    return run_plan(bed, emulated, plan, _devices(case, described(links)), seconds)


def plan_of(case: Case, profile: Profile, links: Cluster) -> Plan:
    """Return the plan of a case for its emulated profile."""
    if case.config is not None:
        stages = balanced_stages(profile, len(case.config))
        if case.layers is not None:
            stages = in_proportion(len(profile.layers), case.layers)
        return given_plan(profile, links, stages, case.config, case.schedule, case.microbatches)
    cut = profile
    if case.seed is not None:
        rng = random.Random(case.seed)
        names = [layer.name for layer in profile.layers[:-1]]
        joined = {*profile.no_cut_after, *rng.sample(names, len(names) // 2)}
        cut = profile.model_copy(
            update={"no_cut_after": tuple(name for name in names if name in joined)}
        )
    plan = solve(
        cut,
        links,
        schedule=case.schedule,
        microbatches=case.microbatches,
        chunks=case.chunks,
        max_stages=case.max_stages,
    )
    return plan.model_copy(update={"profile_digest": profile.digest})


def _devices(case: Case, links: str) -> str:
    """Return the emulated devices and links, with the testbed's link in parentheses: "4, 1Gbps (45
    Mbps)".
    """
    sizes = "x".join(map(str, case.sizes))
    return f"{sizes}, {', '.join(case.bandwidths)} ({links.removeprefix(f'{sizes}, ')})"
