"""Measure what moving to another plan gives real workers that are disturbed. See README.md.

python -m benchmarks.testbed.replan.real --save
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tabulate import tabulate

import planner
from benchmarks.kept import ROOT, Results
from benchmarks.netns import Network, shaped_network
from benchmarks.testbed.replan.asleep import FORWARD_S
from benchmarks.testbed.replan.picture import throughput_svg
from benchmarks.testbed.two_cores.launch import CORES, run_workers
from benchmarks.testbed.two_cores.straight import straight_plan
from planner.analysis.recut import recut
from planner.formats.cluster import flat_cluster
from planner.formats.files import replace, write_text
from planner.formats.plan import Plan, save_plan
from planner.formats.profile import Profile, save_profile
from planner.plan.blocks import blocks_of
from planner.solver.clock import NO_LIMIT
from planner.units import parse_bandwidth

FOLDER = Path(__file__).parent
PICTURE = ROOT / "docs" / "images" / "replan.svg"
GAIN = 0.1  # what is left of a run of a minute repays no move otherwise
DRAWN = "emulated"  # case of the picture
MICROBATCHES = 4  # for each two workers
WINDOW = 10
PROFILE_S = 6.0
SETTLING_S = 0.5  # of each part, which is left out of its mean
TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Spans:
    """For how long a run is left alone, disturbed, and left alone again."""

    before_s: float = 15.0
    during_s: float = 35.0
    after_s: float = 15.0

    def times(self, factor: float) -> Spans:
        """Return so many times as long ones."""
        return Spans(factor * self.before_s, factor * self.during_s, factor * self.after_s)


@dataclass(frozen=True)
class Disturbance:
    """What happens to the workers for a while."""

    name: str
    bandwidth: str  # of the links between the workers
    slower: str | None = None  # during the disturbance
    emulated: bool = False  # devices, of which one becomes slower
    times_slower: float = 2.5  # that device
    workers: int = 2
    layers: int = 8  # of the model, on emulated devices
    spans: Spans = Spans()

    @property
    def model(self) -> Path:
        """The model file."""
        return FOLDER / ("asleep.py" if self.emulated else "model.py")

    @property
    def microbatches(self) -> int:
        """Of a minibatch."""
        return MICROBATCHES * self.workers // 2

    @property
    def can_run(self) -> bool:
        """Whether this machine has a core for each worker; emulated devices sleep, and share."""
        return self.emulated or (os.cpu_count() or 1) >= self.workers

    @property
    def environment(self) -> dict[str, str]:
        """What the model file reads."""
        return {"REPLAN_LAYERS": str(self.layers), "REPLAN_SLOWER": str(self.times_slower)}


# Four workers have twice the samples in a window.
_OF_FOUR = Spans(before_s=30.0, during_s=60.0)
# A device that is ten times slower takes half a minute for a window of minibatches; and a worker
# that is left out comes back ten times as late as the move before it has taken.
_LONG = Spans(before_s=30.0, during_s=100.0, after_s=60.0)
CASES = (
    Disturbance("emulated", "1Gbps", emulated=True),
    Disturbance("core", "1Gbps"),
    Disturbance("link", "100Mbps", "10Mbps"),
    Disturbance("left out", "1Gbps", emulated=True, times_slower=10.0, spans=_LONG),
    Disturbance("emulated, four", "1Gbps", emulated=True, workers=4, layers=12, spans=_OF_FOUR),
    Disturbance(
        "left out, four",
        "1Gbps",
        emulated=True,
        times_slower=10.0,
        workers=4,
        layers=12,
        spans=_LONG,
    ),
    Disturbance("core, four", "1Gbps", workers=4),
    Disturbance("link, four", "100Mbps", "10Mbps", workers=4),
)


@dataclass(frozen=True)
class Row:
    """A run: the times of its updates, in seconds since the disturbance began, and its moves."""

    replan: bool
    minibatch_size: int
    updates: list[float]
    moves: list[str]
    moved_at: list[float]
    standing_s: list[float]

    def rate(self, first_s: float, end_s: float) -> float:
        """Return the samples per second between two moments."""
        inside = [at for at in self.updates if first_s <= at < end_s]
        return (len(inside) - 1) * self.minibatch_size / (inside[-1] - inside[0])


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Take half of a core."""
    command = ["taskset", "-c", str(core), sys.executable, "-c", "while True: pass"]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def slow_device(flag: Path) -> Iterator[None]:
    """Make the emulated device of worker 1 slower."""
    flag.touch()
    try:
        yield
    finally:
        flag.unlink()


@contextmanager
def slow_link(net: Network, case: Disturbance) -> Iterator[None]:
    """Shape the link to its slower rate."""
    assert case.slower is not None
    net.shape(tc_rate(case.slower))
    try:
        yield
    finally:
        net.shape(tc_rate(case.bandwidth))


def tc_rate(bandwidth: str) -> str:
    """Return a bandwidth as `tc` writes it."""
    return f"{8 * parse_bandwidth(bandwidth):.0f}bit"


def disturbed(
    times: Path,
    disturb: Callable[[], AbstractContextManager[None]],
    moments: list[float],
    spans: Spans,
) -> None:
    """Disturb a run from a while after its first update on; note when."""
    while not times.exists():
        time.sleep(0.05)
    time.sleep(spans.before_s)
    moments.append(time.monotonic())
    with disturb():
        time.sleep(spans.during_s)


def solved(case: Disturbance, folder: Path) -> Plan:
    """Profile the model beside a second process, and return the best plan of one worker per
    stage.
    """
    os.environ |= case.environment
    profile = planner.profile(
        case.model, batch_size=1, device="cpu", seconds=PROFILE_S, processes=len(CORES)
    )
    if case.emulated:
        # What an emulated device takes is known.
        asleep = [
            replace(layer, forward_s=FORWARD_S, backward_s=2 * FORWARD_S)
            for layer in profile.layers
            if layer.parameters
        ]
        profile = replace(profile, layers=(*asleep, *profile.layers[len(asleep) :]))
    save_profile(profile, folder / "profile.json")
    plan = best_straight(case, profile)
    save_plan(plan, folder / "plan.json")
    return plan


def best_straight(case: Disturbance, profile: Profile) -> Plan:
    """Return the best plan of one worker per stage: of two, of all cuts; of more, near equal
    stages.
    """
    cluster = flat_cluster(case.workers, parse_bandwidth(case.bandwidth))
    if case.workers == 2:
        return straight_plan(profile, cluster, "1f1b-flush", case.microbatches)
    blocks = case.layers if case.emulated else len(blocks_of(profile))
    ends = [blocks * stage // case.workers for stage in range(case.workers + 1)]
    counts = [end - first for first, end in pairwise(ends)]
    equal = planner.price(
        profile, cluster, counts, schedule="1f1b-flush", microbatches=case.microbatches
    )
    return recut(profile, equal, cluster, NO_LIMIT)


def measured(case: Disturbance, plan: Plan, *, replan: bool, folder: Path) -> Row:
    """Train beside a disturbance."""
    spans = case.spans
    with shaped_network(case.workers) as net:
        net.shape(tc_rate(case.bandwidth))
        # Disturbed ones take about twice as long.
        minibatch_s = plan.predicted.seconds_per_minibatch
        steps = round((spans.before_s + 0.5 * spans.during_s + spans.after_s) / minibatch_s)

        times = folder / f"times-{replan}"
        slow = folder / f"slow-{replan}"
        os.environ |= {"REPLAN_TIMES": str(times), "REPLAN_SLOW": str(slow)}
        arguments = ["train", str(case.model), "--plan", str(folder / "plan.json"), "--json"]
        arguments += ["--steps", str(steps), "--drift-window", str(WINDOW)]
        if replan:
            arguments += ["--replan", "--replan-gain", str(GAIN)]

        def disturb() -> AbstractContextManager[None]:
            if case.emulated:
                return slow_device(slow)
            if case.slower is None:
                return busy_core(CORES[1])
            return slow_link(net, case)

        moments: list[float] = []
        thread = threading.Thread(
            target=disturbed, args=(times, disturb, moments, spans), daemon=True
        )
        thread.start()
        result = run_workers(net.hosts, "planner", arguments, TIMEOUT_S)
        thread.join()
    return _row(result, times, moments[0], replan=replan, size=plan.minibatch_size or 1)


def _row(result: dict[str, Any], times: Path, began_s: float, *, replan: bool, size: int) -> Row:
    lines = [line.split() for line in times.read_text("utf-8").splitlines()]
    at = {int(minibatch): float(second) - began_s for minibatch, second in lines}
    moves = result["moves"]
    return Row(
        replan=replan,
        minibatch_size=size,
        updates=sorted(at.values()),
        moves=[f"{move['before']} to {move['after']}" for move in moves],
        moved_at=[at[max(number for number in at if number < move["minibatch"])] for move in moves],
        standing_s=[move["seconds"] for move in moves],
    )


def _cells(case: Disturbance, row: Row) -> list[object]:
    spans = case.spans
    during_s = spans.during_s
    end_s = row.updates[-1]
    moves = "; ".join(
        f"{what}, {at:.0f} s after it began, in {seconds:.1f} s"
        for what, at, seconds in zip(row.moves, row.moved_at, row.standing_s, strict=True)
    )
    settled_s = 0.5 * during_s
    if row.moves and row.moved_at[0] < during_s - SETTLING_S:
        settled_s = row.moved_at[0] + row.standing_s[0] + SETTLING_S
    after: object = ""
    if end_s > during_s + 2:
        after = row.rate(during_s + SETTLING_S, end_s)
    return [
        case.name,
        "with" if row.replan else "without",
        row.rate(-spans.before_s / 2, 0.0),
        row.rate(SETTLING_S, during_s),
        row.rate(settled_s, during_s),
        after,
        moves,
    ]


HEADERS = (
    "disturbance",
    "--replan",
    "before",
    "during, all",
    "during, after the move or half of it",
    "after",
    "moves",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases with and without moves; draw the first one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=[case.name for case in CASES])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--draw", action="store_true", help="only write tables and picture anew")
    parser.add_argument(
        "--length", type=float, default=1.0, help="run for so many times as long, to try it out"
    )
    options = parser.parse_args(arguments)
    results = Results(FOLDER, save=options.save)
    rows = []
    for usual in CASES:
        case = replace(usual, spans=usual.spans.times(options.length))
        chosen = not options.draw and options.only in (None, case.name)
        if chosen and not case.can_run:
            print(f"{case.name}: left out, for want of a core for each worker", file=sys.stderr)
        elif chosen:
            with tempfile.TemporaryDirectory() as folder:
                plan = solved(case, Path(folder))
                for replan in (False, True):
                    row = measured(case, plan, replan=replan, folder=Path(folder))
                    results.add(case.name, str(replan), row)
                    print(_cells(case, row), file=sys.stderr, flush=True)
        found = results.records(case.name, Row)
        rows += [_cells(case, row) for row in found.values()]
        if options.save and case.name == DRAWN:
            write_text(PICTURE, throughput_svg(found.values(), case.spans.during_s))
    table = tabulate(rows, headers=HEADERS, floatfmt=".1f", tablefmt="github")
    text = f"Measured, in samples/s: {results.about(DRAWN)}\n\n{table}"
    print(text)
    if options.save:
        write_text(FOLDER / "real.md", text + "\n")


if __name__ == "__main__":
    main()
