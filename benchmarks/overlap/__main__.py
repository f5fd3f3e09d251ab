"""Measure whether communication overlaps computation. See README.md in this folder.

python -m benchmarks.overlap --save
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

from benchmarks.testbed.bed import Testbed, testbed
from benchmarks.testbed.emulate import Scale, emulate
from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value
from planner.solver.assemble import assemble
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.workers.job import Job

COMPUTE_S = 0.12  # of one stage for one minibatch; long, so that late sleeps hardly matter
NOMINAL_BYTES_PER_S = 12.5e6
FAST_BYTES_PER_S = 1e9  # stands for no link at all
SHARES = (0.2, 0.5, 0.8, 0.9)
RESULTS, README = (Path(__file__).with_name(name) for name in ("results.json", "README.md"))
MARKER = "<!-- result -->"


def main() -> None:
    """Measure samples/s at each share of the link's capacity, and over a very fast link."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--minibatches", type=int, default=60)
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=SHARES,
        help="seconds on the link per one computed",
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help=f"write {RESULTS.name}, and the table into {README.name}",
    )
    arguments = parser.parse_args()
    rows = []
    with testbed(arguments.stages) as bed, tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        link = bed.links(flat_cluster(arguments.stages, NOMINAL_BYTES_PER_S))
        for share in arguments.shares:
            size = round(share * COMPUTE_S * link.slowest_bandwidth_bytes_per_s)
            own = Path(folder) / str(share)
            own.mkdir()
            bound = _measure(bed, _fast(arguments.stages), size, arguments, own)
            shared = _measure(
                bed, flat_cluster(arguments.stages, NOMINAL_BYTES_PER_S), size, arguments, own
            )
            rows.append({"share": share, "message_bytes": size, "no_link": bound, "link": shared})
    shown = [
        [f"{r['share']:.0%}", f"{r['message_bytes'] / 1e6:.2f}", f"{r['no_link']:.2f}", f"{r['link']:.2f}",
         f"{r['link'] / r['no_link']:.1%}"]
        for r in rows
    ]  # fmt: skip
    headers = [
        "link needs, of compute",
        "MB each way",
        "minibatches/s, no link",
        "with the link",
        "of it",
    ]
    table = tabulate(shown, headers, tablefmt="github", disable_numparse=True)
    print(table)
    if arguments.save:
        load = Path("/proc/loadavg").read_text(encoding="utf-8").split()[0]
        content = {
            "date": time.strftime("%Y-%m-%d"),
            "load": load,
            "stages": arguments.stages,
            "rows": rows,
        }
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        head = README.read_text(encoding="utf-8").split(MARKER)[0]
        about = (
            f"{content['date']}, emulated devices, {arguments.stages} stages, "
            f"{arguments.minibatches} minibatches."
        )
        README.write_text(f"{head}{MARKER}\n\n{about}\n\n{table}\n", encoding="utf-8")


def _fast(stages: int) -> Cluster:
    return flat_cluster(stages, FAST_BYTES_PER_S)


def _measure(
    bed: Testbed, cluster: Cluster, message_bytes: int, arguments: argparse.Namespace, folder: Path
) -> float:
    """Return minibatches per second in steady state, over links like those of `cluster`."""
    measured = bed.links(cluster)
    emulated = emulate(_profile(arguments.stages, message_bytes), Scale(1.0, 1.0), folder)
    plan = _plan(emulated.profile, measured, arguments.stages)
    job = Job(model=str(emulated.path), plan=plan, steps=arguments.minibatches)
    return bed.train(job, cluster, 1.0, 60 + 10 * COMPUTE_S * arguments.minibatches).samples_per_s


def _profile(stages: int, message_bytes: int) -> Profile:
    """Return a profile of a layer per stage; each sends this many bytes and gets as many gradients
    back.
    """
    layers = tuple(
        Layer(
            name=f"layer{index}",
            op="sleep",
            forward_s=COMPUTE_S / 3,
            backward_s=COMPUTE_S * 2 / 3,
            update_s=0.0,
            outputs=(
                Value(
                    name=f"value{index}", output_bytes=message_bytes, gradient_bytes=message_bytes
                ),
            ),
            weight_bytes=4,
            gradient_bytes=4,
            parameters=(f"{index}.weight",),
        )
        for index in range(stages)
    )
    return Profile(
        model="overlap",
        graph_hash="made-up",
        device=Device(kind="cpu", name="emulated", threads=1),
        dtype="float32",
        microbatch_size=1,
        layers=layers,
        edges=tuple(
            Edge(source=f"layer{k}", value=f"value{k}", target=f"layer{k + 1}")
            for k in range(stages - 1)
        ),
        provenance=Provenance(tool="benchmarks.overlap", source="estimated"),
    )


def _plan(profile: Profile, cluster: Cluster, stages: int) -> Plan:
    """Return a plan with one layer per stage, the loss with the last, and enough minibatches in
    flight for the link.
    """
    layer_costs = LayerCosts(profile)
    groups = [[index] for index in range(stages)]
    groups[-1] += range(stages, len(profile.layers))
    chosen = candidates(groups, [1] * stages)
    problem = Problem(layer_costs, Setting(cluster), budget=Budget.unlimited())
    return assemble(problem, evaluate(problem, chosen))


if __name__ == "__main__":
    main()
