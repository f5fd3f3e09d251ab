"""Time the Transformer's minibatches on four emulated devices: python -m
benchmarks.convergence.devices --help.

`links.py` trains four workers on the cores that there are. Where these are fewer than the workers,
a schedule that lets workers wait loses little by it, because others compute meanwhile. Here every
worker has a device of its own, as fast as one core, by the testbed of `benchmarks/testbed`: layers
sleep for the times of a measured profile, and messages are real. How many minibatches a loss takes
is known from `links.py`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.convergence import links, transformer
from benchmarks.convergence.recipes import Recipe
from benchmarks.testbed.bed import Testbed, testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.emulate import emulate, fitting_scale
from benchmarks.testbed.measure import data_parallel_run, run_plan
from benchmarks.testbed.predict import given_plan
from planner.api.running import profile
from planner.formats.cluster import flat_cluster
from planner.formats.names import CodecName
from planner.formats.profile import Profile
from planner.units import parse_bandwidth

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "devices.json", HERE / "devices.md"
DEVICES = 4
# Contender, microbatches of a minibatch, what stages send.
CONTENDERS: tuple[tuple[str, int, CodecName], ...] = (
    ("1f1b", 1, "none"),
    ("1f1b", 1, "int8"),
    ("1f1b-flush", 4, "none"),
    ("1f1b-flush", 8, "none"),
    ("1f1b-flush", 4, "int8"),
    ("1f1b-flush", 8, "int8"),
    (links.DDP, 4, "none"),
)


@dataclass(frozen=True)
class Timed:
    """Seconds per minibatch of 32 samples on the emulated devices."""

    contender: str
    parts: int
    compress: CodecName
    bandwidth: str
    predicted_s: float
    measured_s: float

    @property
    def name(self) -> str:
        """The contender, with what it compresses to."""
        return self.contender + (f", {self.compress}" if self.compress != "none" else "")


def main() -> None:
    """Profile, run every contender over every link, keep the times, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidths", default="100Mbps,1Gbps")
    parser.add_argument("--optimizer", default="newest-muon, by rows")
    parser.add_argument(
        "--minibatches", type=int, default=800, help="of the training that sets the loss to reach"
    )
    parser.add_argument("--rate", type=float, default=0.016)
    parser.add_argument(
        "--clip", type=float, help="norm of gradients, as --clip-grad-norm of plan train"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measured run")
    parser.add_argument("--table", action="store_true", help="run nothing; write devices.md")
    args = parser.parse_args()
    recipe = Recipe(args.optimizer, args.rate, args.minibatches)
    if not args.table:
        recipe.choose()
        timed = measured(args.bandwidths.split(","), args.seconds)
        RESULTS.write_text(
            json.dumps([asdict(each) for each in timed], indent=1) + "\n", encoding="utf-8"
        )
    known = [Timed(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))]
    TABLE.write_text(table(known, recipe, args.clip) + "\n", encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))


def measured(bandwidths: Sequence[str], seconds: float) -> list[Timed]:
    """Run all contenders over links of each bandwidth."""
    model = f"{transformer.__file__}:build_model"
    sizes = sorted({transformer.MINIBATCH // parts for _, parts, _ in CONTENDERS})
    profiles = {size: profile(model, batch_size=size, seconds=5.0) for size in sizes}
    with testbed(DEVICES) as bed:
        return [
            _run(
                bed, profiles[transformer.MINIBATCH // contender[1]], contender, bandwidth, seconds
            )
            for bandwidth in bandwidths
            for contender in CONTENDERS
        ]


def _run(
    bed: Testbed,
    layers: Profile,
    contender: tuple[str, int, CodecName],
    bandwidth: str,
    seconds: float,
) -> Timed:
    name, parts, compress = contender
    target = flat_cluster(DEVICES, parse_bandwidth(bandwidth))
    stages = [transformer.stage_of(layer.name, DEVICES) for layer in layers.layers]
    scale = fitting_scale(layers, target)
    with tempfile.TemporaryDirectory(prefix="devices-") as folder:
        emulated = emulate(layers, scale, Path(folder))
        shaped = bed.links(scale.cluster(target), byte_factor=scale.byte_factor)
        shaped = shaped.model_copy(update={"compress": compress})
        schedule = "1f1b-flush" if name == links.DDP else name
        counts = [stages.count(number) for number in range(DEVICES)]
        # the emulated loss is a layer of its own
        counts[-1] += len(emulated.profile.layers) - len(stages)
        with scaled_buckets(scale.byte_factor):
            plan = given_plan(
                emulated.profile, shaped, counts, [1] * DEVICES, schedule, parts, "published"
            )
        if name == links.DDP:
            run = data_parallel_run(bed, emulated, shaped, seconds, plan)
        else:
            run = run_plan(bed, emulated, plan, bandwidth, seconds)
    timed = Timed(
        name,
        parts,
        compress,
        bandwidth,
        *(each / scale.time_factor for each in (run.predicted_s, run.measured_s)),
    )
    print(timed, flush=True)
    return timed


def table(timed: Sequence[Timed], recipe: Recipe, clip: float | None) -> str:
    """Return the seconds to the loss that 1f1b has at the end of a training with this recipe."""
    runs = links.alike([run for run in links.read() if run.case.compress == "none"], recipe, clip)
    target = links.mean_loss(runs, "1f1b", DEVICES, recipe.minibatches)
    rows = []
    for bandwidth in dict.fromkeys(each.bandwidth for each in timed):
        least: dict[str, Timed] = {}
        for each in sorted(
            (each for each in timed if each.bandwidth == bandwidth), key=lambda e: -e.measured_s
        ):
            least[each.name] = each
        # DDP makes the same updates as the schedule that drains.
        needed = {
            name: links.to_loss(
                runs, "1f1b" if each.contender == "1f1b" else "1f1b-flush", DEVICES, target
            )
            for name, each in least.items()
        }
        first_s = needed["1f1b"] * least["1f1b"].measured_s
        for name, each in sorted(least.items()):
            total_s = needed[name] * each.measured_s
            ms = (f"{1e3 * each.predicted_s:.1f}", f"{1e3 * each.measured_s:.1f}")
            rows.append(
                (
                    bandwidth,
                    name,
                    each.parts,
                    f"{needed[name]:.0f}",
                    *ms,
                    f"{total_s:.1f}",
                    f"{total_s / first_s:.2f}",
                )
            )
    headers = (
        "links",
        "",
        "microbatches",
        f"minibatches to {target:.3f}",
        "ms predicted",
        "ms measured",
        "seconds",
    )
    return tabulate(rows, (*headers, "of 1f1b's"), tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    main()
