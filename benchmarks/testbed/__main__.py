"""Run a plan and data parallelism on emulated devices, and compare with predictions. See README.md
in this folder.

python -m benchmarks.testbed --profile profiles/vgg16/cpu.json --gpus 4 --bandwidth 1Gbps
python -m benchmarks.testbed --profile profiles/resnet50/cpu.json --topology 2x4 --bandwidth
10Gbps,1Gbps
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

from benchmarks.testbed.bed import testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.emulate import LINK_BYTES_PER_S, emulate, fitting_scale
from benchmarks.testbed.measure import data_parallel_run, described, run_plan
from benchmarks.testbed.predict import balanced_stages, given_plan
from planner.cli.output import print_complaint
from planner.errors import InputError, PlannerError
from planner.formats.cluster import Cluster, hierarchical_cluster
from planner.formats.names import CODECS
from planner.formats.plan import Plan
from planner.formats.profile import Profile, load_profile
from planner.schedule.registry import NAMES
from planner.solver import search_plan as solve
from planner.units import parse_bandwidth

MOST_DEVICES = 32  # processes of 200 MB on a machine of two cores


def main() -> None:
    """Run, and print predictions and measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--profile", type=Path, required=True, help="whose times and bytes the devices emulate"
    )
    parser.add_argument("--gpus", type=int, help="devices, each on a link of its own")
    parser.add_argument("--topology", help="GPUxSERVERS instead, with two bandwidths")
    parser.add_argument(
        "--bandwidth", required=True, help="of the links of the devices that are emulated: 10Gbps"
    )
    parser.add_argument("--schedule", choices=NAMES, default="1f1b")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument(
        "--config", help="replicas per stage, of equal time, instead of the best plan: 2-1-1"
    )
    parser.add_argument("--compress", choices=CODECS, default="none", help="what stages send")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measured run")
    parser.add_argument(
        "--link", type=float, default=LINK_BYTES_PER_S, help="bytes/s of the slowest link here"
    )
    arguments = parser.parse_args()
    try:
        _run(arguments)
    except PlannerError as error:  # as the command line says it
        print_complaint("error", error.message, error.hint or f"see: {parser.prog} --help")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(arguments: argparse.Namespace) -> None:
    profile = load_profile(arguments.profile)
    target = _cluster(arguments)
    _replicas(arguments, target)
    scale = fitting_scale(profile, target, arguments.link)
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder, testbed(target.gpus) as bed:
        emulated = emulate(profile, scale, Path(folder))
        links = bed.links(scale.cluster(target), byte_factor=scale.byte_factor)
        links = links.model_copy(update={"compress": arguments.compress})
        with scaled_buckets(scale.byte_factor):
            plan = _plan(emulated.profile, links, arguments)
        run = run_plan(bed, emulated, plan, described(links), arguments.seconds)
        bsp = data_parallel_run(bed, emulated, links, arguments.seconds, plan)
    print(
        f"{profile.model} emulated on {target.gpus} devices over {run.cluster} as measured: times "
        f"x "
        f"{scale.time_factor:.3g}, bytes x {scale.byte_factor:.3g}"
    )
    rows = [
        [f"{r.config} {r.schedule}", r.cost_model_s, r.predicted_s, r.measured_s, r.error]
        for r in (run, bsp)
    ]
    headers = ["", "cost model, s", "predicted, s", "measured, s", "error"]
    print(tabulate(rows, headers, floatfmt=("", ".4f", ".4f", ".4f", "+.1%")))
    print(f"speed-up over data parallelism: measured {bsp.measured_s / run.measured_s:.2f}")


def _cluster(arguments: argparse.Namespace) -> Cluster:
    bandwidths = [parse_bandwidth(rate) for rate in arguments.bandwidth.split(",")]
    if (arguments.gpus is None) == (arguments.topology is None):
        raise InputError(
            "the devices are said by --gpus or by --topology", hint="give one of the two"
        )
    try:
        sizes = (
            [int(size) for size in arguments.topology.split("x")]
            if arguments.topology
            else [arguments.gpus]
        )
    except ValueError:
        raise InputError(
            f"'{arguments.topology}' is no topology", hint="write 2x4: two devices on four servers"
        ) from None
    cluster = hierarchical_cluster(sizes, bandwidths)
    if cluster.gpus > MOST_DEVICES or len(sizes) > 2:
        raise InputError(
            f"{cluster.gpus} devices on {len(sizes)} levels are more than one machine plays",
            hint=f"at most {MOST_DEVICES}, on one level or two",
        )
    return cluster


def _replicas(arguments: argparse.Namespace, cluster: Cluster) -> list[int] | None:
    """Return the replicas per stage that --config names."""
    if arguments.config is None:
        return None
    counts = arguments.config.split("-")
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise InputError(
            f"'{arguments.config}' is no config", hint="write replicas per stage: 2-1-1"
        )
    replicas = [int(count) for count in counts]
    if sum(replicas) > cluster.gpus:
        raise InputError(
            f"the config '{arguments.config}' needs {sum(replicas)} devices, and there are "
            f"{cluster.gpus}",
            hint=f"give --gpus {sum(replicas)}",
        )
    return replicas


def _plan(profile: Profile, links: Cluster, arguments: argparse.Namespace) -> Plan:
    schedule, microbatches = arguments.schedule, arguments.microbatches
    replicas = _replicas(arguments, links)
    if replicas is None:
        return solve(profile, links, schedule=schedule, microbatches=microbatches)
    return given_plan(
        profile, links, balanced_stages(profile, len(replicas)), replicas, schedule, microbatches
    )


if __name__ == "__main__":
    main()
