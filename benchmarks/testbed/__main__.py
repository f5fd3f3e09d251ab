"""A plan and data parallelism on emulated devices: predicted, simulated, measured. See README.md in this folder.

python -m benchmarks.testbed --profile profiles/vgg16/cpu.json --gpus 4 --bandwidth 1Gbps
python -m benchmarks.testbed --profile profiles/resnet50/cpu.json --topology 2x4 --bandwidth 10Gbps,1Gbps
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import get_args

from tabulate import tabulate

from benchmarks.testbed.bed import testbed
from benchmarks.testbed.emulate import LINK_BYTES_PER_S, emulate, fitting_scale
from benchmarks.testbed.measure import DDP_BUCKET_BYTES, described, run_plan, train_s
from benchmarks.testbed.predict import balanced_stages, data_parallel_s, given_plan
from planner.cluster import Cluster, hierarchical_cluster
from planner.pipedream import read_profile
from planner.plan_file import Plan, ScheduleName
from planner.profile_file import Profile
from planner.solver import solve
from planner.units import parse_bandwidth


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True, help="whose times and bytes the devices emulate")
    parser.add_argument("--gpus", type=int, help="devices, each on a link of its own")
    parser.add_argument("--topology", help="GPUxSERVERS instead, with two bandwidths")
    parser.add_argument("--bandwidth", required=True, help="of the links of the devices that are emulated: 10Gbps")
    parser.add_argument("--schedule", choices=get_args(ScheduleName), default="1f1b")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--config", help="replicas per stage, of equal time, instead of the best plan: 2-1-1")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measured run")
    parser.add_argument("--link", type=float, default=LINK_BYTES_PER_S, help="bytes/s of the slowest link here")
    arguments = parser.parse_args()
    profile = read_profile(arguments.profile)
    target = _cluster(arguments)
    scale = fitting_scale(profile, target, arguments.link)
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder, testbed(target.gpus) as bed:
        emulated = emulate(profile, scale, Path(folder))
        links = bed.links(scale.cluster(target))
        plan = _plan(emulated.profile, links, arguments)
        run = run_plan(bed, emulated, plan, described(links), arguments.seconds)
        dp_s = train_s(bed, emulated, plan, arguments.seconds, "data-parallel") * plan.microbatches
    bucketed_s = data_parallel_s(emulated.profile, links, DDP_BUCKET_BYTES * scale.byte_factor) / target.gpus
    predicted_dp_s = run.predicted_s * plan.predicted.speedup_over_data_parallel
    print(
        f"{profile.model} emulated on {target.gpus} devices over {run.cluster} as measured: times x "
        f"{scale.time_factor:.3g}, bytes x {scale.byte_factor:.3g}"
    )
    rows = [
        [f"{run.config} {run.schedule}", run.predicted_s, run.simulated_s, run.measured_s, run.error],
        ["DistributedDataParallel", predicted_dp_s, bucketed_s * plan.microbatches, dp_s, predicted_dp_s / dp_s - 1],
    ]
    headers = ["", "predicted, s", "simulated, s", "measured, s", "error"]
    print(tabulate(rows, headers, floatfmt=("", ".4f", ".4f", ".4f", "+.1%")))
    print(f"speed-up over data parallelism: measured {dp_s / run.measured_s:.2f}")


def _cluster(arguments: argparse.Namespace) -> Cluster:
    bandwidths = [parse_bandwidth(rate) for rate in arguments.bandwidth.split(",")]
    sizes = [int(size) for size in arguments.topology.split("x")] if arguments.topology else [arguments.gpus]
    return hierarchical_cluster(sizes, bandwidths)


def _plan(profile: Profile, links: Cluster, arguments: argparse.Namespace) -> Plan:
    schedule, microbatches = arguments.schedule, arguments.microbatches
    if arguments.config is None:
        return solve(profile, links, schedule=schedule, microbatches=microbatches)
    replicas = [int(count) for count in arguments.config.split("-")]
    assert math.prod(level.size for level in links.levels) >= sum(replicas)
    return given_plan(profile, links, balanced_stages(profile, len(replicas)), replicas, schedule, microbatches)


if __name__ == "__main__":
    main()
