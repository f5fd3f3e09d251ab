"""Compare predictions with measurements of many runs on emulated devices. See README.md in this
folder.

python -m benchmarks.testbed.predictions --save
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from benchmarks.kept import environment, marks, write_between
from benchmarks.testbed.bed import ROOT, Testbed, testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.emulate import LINK_BYTES_PER_S, emulate, fitting_scale
from benchmarks.testbed.measure import Measured, described, run_plan
from benchmarks.testbed.picture import scatter_svg
from benchmarks.testbed.predict import balanced_stages, given_plan, in_proportion
from planner.formats.cluster import Cluster, hierarchical_cluster
from planner.formats.names import CodecName
from planner.formats.plan import Plan
from planner.formats.profile import Profile, load_profile
from planner.solver import search_plan as solve
from planner.units import parse_bandwidth

TABLE = Path(__file__).with_name("predictions.md")
PICTURE = ROOT / "docs" / "images" / "testbed-predictions.svg"
PAGE = ROOT / "docs" / "benchmarks.md"
HEADERS = ("model", "devices", "plan", "predicted, s", "measured, s", "error", "of the cost model")
FORMATS = ("", "", "", ".4f", ".4f", "+.1%", "+.1%")


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


CASES = (
    Case("vgg16", (4,), ("1Gbps",)),
    Case("vgg16", (4,), ("1Gbps",), (1, 1, 1, 1)),
    Case("vgg16", (4,), ("100Mbps",), (1, 1, 1, 1)),
    Case("vgg16", (4,), ("1Gbps",), (1, 1, 1, 1), "1f1b-flush", 8),
    Case("vgg16", (8,), ("1Gbps",)),
    Case("vgg16", (16,), ("1Gbps",)),
    Case("resnet50", (4,), ("1Gbps",)),
    Case("resnet50", (4,), ("1Gbps",), (2, 2)),
    Case("resnet50", (4,), ("1Gbps",), (1, 1, 1, 1), "gpipe", 8),
    Case("resnet50", (8,), ("500Mbps",), (2, 2, 2, 2)),
    Case("alexnet", (4,), ("1Gbps",)),
    Case("alexnet", (8,), ("10Gbps",)),
    Case("gnmt8", (4,), ("1Gbps",), (1, 1, 1, 1)),
    Case("gnmt8", (4,), ("1Gbps",), (2, 2), "1f1b-flush", 8),
    Case("gpt2", (4,), ("1Gbps",)),
    Case("gpt2", (4,), ("1Gbps",), (1, 1, 2), layers=(1, 1, 1)),
    Case("gpt2", (4,), ("1Gbps",), (1, 1, 1, 1), "gpipe", 8),
    Case("vgg16", (2, 2), ("4Gbps", "1Gbps"), link_bytes_per_s=LINK_BYTES_PER_S / 2),
    Case("vgg16", (4, 2), ("4Gbps", "1Gbps"), link_bytes_per_s=LINK_BYTES_PER_S / 2),
    Case("resnet50", (2, 4), ("4Gbps", "1Gbps"), link_bytes_per_s=LINK_BYTES_PER_S / 2),
    Case("alexnet", (2, 2), ("4Gbps", "1Gbps"), link_bytes_per_s=LINK_BYTES_PER_S / 2),
)


def main() -> None:
    """Run all cases, print the table, and save it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="of each run, after its start-up"
    )
    parser.add_argument("--cases", type=int, nargs="+", help="run these only, counted from 0")
    parser.add_argument(
        "--save",
        action="store_true",
        help=f"write {TABLE.name} and, in docs/, the table and a picture",
    )
    arguments = parser.parse_args()
    cases = CASES if arguments.cases is None else [CASES[index] for index in arguments.cases]
    runs = measure(cases, arguments.seconds)
    text = report(runs)
    print(text)
    if arguments.save:
        TABLE.write_text(text + "\n", encoding="utf-8")
        PICTURE.write_text(scatter_svg(runs), encoding="utf-8")
        image = f"![Predicted against measured seconds per minibatch](images/{PICTURE.name})"
        write_between(PAGE, marks("predictions", "testbed.predictions"), f"{text}\n\n{image}")


def measure(cases: Sequence[Case], seconds: float) -> list[Measured]:
    """Run every case on one set of hosts."""
    most = max(hierarchical_cluster(case.sizes, [1.0] * len(case.sizes)).gpus for case in cases)
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder, testbed(most) as bed:
        for number, case in enumerate(cases):
            runs.append(run_case(bed, case, seconds, Path(folder) / str(number)))
            print(f"{number + 1}/{len(cases)}: {_row(runs[-1])}", file=sys.stderr, flush=True)
    return runs


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


def report(runs: Sequence[Measured]) -> str:
    """Return the table and its summary in Markdown."""
    table = tabulate([_row(run) for run in runs], HEADERS, tablefmt="github", floatfmt=FORMATS)
    lines = [f"On emulated devices, {time.strftime('%Y-%m-%d')}, {environment()}:", "", table, ""]
    for what, errors in (
        ("predicted", [abs(run.error) for run in runs]),
        ("cost model alone", [abs(run.cost_model_error) for run in runs]),
    ):
        lines.append(
            f"{what}: median error {median(errors):.1%}, worst {max(errors):.1%} over {len(runs)} "
            f"runs"
        )
    return "\n".join(lines)


def _row(run: Measured) -> list[object]:
    plan = f"{run.config} {run.schedule}"
    return [
        run.model,
        run.cluster,
        plan,
        run.predicted_s,
        run.measured_s,
        run.error,
        run.cost_model_error,
    ]


if __name__ == "__main__":
    main()
