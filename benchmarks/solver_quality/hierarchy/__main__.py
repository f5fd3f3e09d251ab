"""Measure what the solver gains from knowing a cluster's levels. See README.md in this folder."""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import ANCHORS, ROOT, printed
from benchmarks.published.graph_txt import load_graph_txt
from planner.formats.cluster import Cluster, hierarchical_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value, load_profile
from planner.options.solving import SolveOptions
from planner.reporting.tables.plan import ranks_line
from planner.schedule.registry import find
from planner.solver.evaluate import orders
from planner.solver.find_plan import find_plan
from planner.solver.request import Request
from planner.solver.tuning.record import STANDARD, Tuning
from planner.units import format_seconds

PUBLISHED = ANCHORS / "pipedream"
INNER, OUTER = 16e9, 1.25e9
PROFILES = ROOT / "profiles"
TABLES = ("chains", "local", "orders")
ORDERED, ORDERED_SERVERS, MICROBATCHES = ("interleaved", "zb-v"), ((4, 4), (8, 2)), 64
SEARCHED, SERVERS, BETWEEN_MBPS = (
    ("resnet50", "vgg16", "gnmt8", "bert"),
    ((4, 2), (4, 4)),
    (100, 200, 500),
)
WITHOUT_LOCAL_SEARCH = replace(STANDARD, levels=replace(STANDARD.levels, most_priced=0))
CHAINS = (
    (100, (4, 4)),
    (300, (8, 8)),
    (1500, (8, 8)),
    (1500, (8, 32)),
    (300, (8, 2048)),
    (1500, (8, 2048)),
    (3000, (8, 2048)),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Solve everything and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.solver_quality.hierarchy", description=__doc__
    )
    parser.add_argument("--only", choices=TABLES, help="one of the tables")
    parser.add_argument(
        "--save", action="store_true", help="write what is printed to results.md beside this"
    )
    parser.add_argument(
        "--chains", type=int, default=len(CHAINS), help="the first so many of them (default: all)"
    )
    args = parser.parse_args(argv)
    with printed(Path(__file__).parent, save=args.save):
        if args.only in (None, "chains"):
            print(chains_table(args.chains))
        if args.only in (None, "local"):
            print()
            print(local_table())
        if args.only in (None, "orders") and PUBLISHED.is_dir():
            print()
            print(orders_table())
    return 0


def chains_table(first: int) -> str:
    """Return the table of random chains on more and more servers."""
    rows = []
    for layers, sizes in CHAINS[:first]:
        plan, seconds = timed(chain(layers), hierarchical_cluster(sizes, (INNER, OUTER)))
        gap = "optimal" if plan.solver.status == "optimal" else f"gap {plan.solver.gap:.1%}"
        rows.append(
            [layers, "x".join(map(str, sizes)), plan.cluster.gpus, format_seconds(seconds), gap]
        )
    return tabulate(rows, headers=["layers", "levels", "GPUs", "solved in", ""], tablefmt="github")


def local_table() -> str:
    """Return the table of our models on servers that share slow links, with and without local
    search.
    """
    rows = []
    for name in SEARCHED:
        profile = load_profile(PROFILES / name / "cpu.json")
        for sizes in SERVERS:
            for between in BETWEEN_MBPS:
                cluster = hierarchical_cluster(sizes, (10e9 / 8, between * 1e6 / 8))
                before, before_s = timed(profile, cluster, tuning=WITHOUT_LOCAL_SEARCH)
                after, after_s = timed(profile, cluster)
                one, other = (plan.predicted.seconds_per_minibatch for plan in (before, after))
                times = [format_seconds(each) for each in (one, before_s, other, after_s)]
                rows.append(
                    [
                        name,
                        f"{sizes[0]}x{sizes[1]}",
                        between,
                        *times,
                        f"{one / other:.2f}",
                        after.config,
                    ]
                )
    headers = [
        "profile",
        "servers",
        "between, Mbps",
        "without",
        "in",
        "with",
        "in",
        "faster",
        "plan",
    ]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def orders_table() -> str:
    """Return the table of the published profiles in both orders of the workers' ranks."""
    rows = []
    for file in sorted(PUBLISHED.glob("*.txt")):
        if file.stem.isupper():  # the licence
            continue
        profile = load_graph_txt(file)
        for schedule in ORDERED:
            for sizes in ORDERED_SERVERS:
                cluster = hierarchical_cluster(sizes, (INNER, OUTER))
                with stage_by_stage():
                    before, _ = timed(profile, cluster, schedule=schedule)
                after, after_s = timed(profile, cluster, schedule=schedule)
                one, other = (plan.predicted.seconds_per_minibatch for plan in (before, after))
                stages = [before.config, format_seconds(one)]
                any_order = [
                    after.config,
                    ranks_line(after.stages[0]),
                    format_seconds(other),
                    f"{one / other:.2f}",
                ]
                servers = "x".join(map(str, sizes))
                rows.append(
                    [file.stem, schedule, servers, *stages, *any_order, format_seconds(after_s)]
                )
    headers = [
        "profile",
        "schedule",
        "servers",
        "stage by stage",
        "time",
        "any order",
        "first stage's ranks",
        "time",
    ]
    return tabulate(
        rows, headers=[*headers, "faster", "in"], tablefmt="github", disable_numparse=True
    )


@contextlib.contextmanager
def stage_by_stage() -> Iterator[None]:
    """Try no other order of ranks within the context."""
    usual, orders.columns_of = orders.columns_of, lambda problem, plan: []
    try:
        yield
    finally:
        orders.columns_of = usual


def timed(
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str = "1f1b",
    tuning: Tuning = STANDARD,
) -> tuple[Plan, float]:
    """Return a plan and the seconds that finding it took, without the start of the process."""
    start, microbatches = time.perf_counter(), MICROBATCHES if find(schedule).divides else 1
    options = SolveOptions(schedule=schedule, microbatches=microbatches)
    plan = find_plan(Request.of(profile, cluster, options, tuning))
    return plan, time.perf_counter() - start


def chain(count: int) -> Profile:
    """Return a chain of layers with random times, weights and activations."""
    draw = random.Random(count)
    layers = tuple(
        Layer(
            name=f"layer{index}",
            op="Linear",
            forward_s=draw.uniform(0.2e-3, 1e-3),
            backward_s=draw.uniform(0.4e-3, 2e-3),
            update_s=draw.uniform(0, 1e-4),
            outputs=(
                Value(
                    name=f"value{index}",
                    output_bytes=(size := draw.randrange(10**6)),
                    gradient_bytes=size,
                ),
            )
            if index < count - 1
            else (),
            weight_bytes=(weights := draw.randrange(10**6)),
            gradient_bytes=weights,
        )
        for index in range(count)
    )
    return Profile(
        model=f"chain of {count}",
        device=Device(kind="cpu", name="imagined"),
        microbatch_size=32,
        layers=layers,
        edges=tuple(
            Edge(source=f"layer{index}", value=f"value{index}", target=f"layer{index + 1}")
            for index in range(count - 1)
        ),
        provenance=Provenance(tool="benchmarks.solver_quality.hierarchy", source="estimated"),
    )


if __name__ == "__main__":
    raise SystemExit(main())
