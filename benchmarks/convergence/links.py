"""Train in real processes over shaped links, for the held-out loss and the time.

    python -m benchmarks.convergence.links --bandwidth 100Mbps
    python -m benchmarks.convergence.links --table

A process per stage, each in a network namespace of its own (`benchmarks/netns.py`). Model, data,
first weights, recipe and minibatches are those of `late.py`. Results are added to links.jsonl, a
line each.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from tabulate import tabulate

from benchmarks.convergence import transformer
from benchmarks.convergence.late import curve_of
from benchmarks.convergence.recipes import Recipe, with_remedies
from benchmarks.testbed.bed import Testbed, testbed
from benchmarks.testbed.predict import given_plan
from planner.api.running import estimate
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.training import TrainingOptions
from planner.schedule.registry import find
from planner.units import parse_bandwidth
from planner.workers.job import Job

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "links.jsonl", HERE / "links.md"
DDP = "DDP"
CONTENDERS = ("1f1b", "2bw", "1f1b-flush", DDP)
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        contender: a schedule or `DDP`.
        recipe: of the whole training.
        minibatches: trained of it; where only the time is of interest, a few.
        stages: of a block each, one per worker; for `DDP`, workers.
        parts: microbatches of a minibatch, where the schedule divides it.
        seed: of first weights and data.
        bandwidth: of each worker's link.
        clip: `--clip-grad-norm`.
        late_lr: `--late-lr`.
        compress: what stages send.
    """

    contender: str
    recipe: Recipe
    minibatches: int
    stages: int
    parts: int
    seed: int
    bandwidth: str
    compress: str = "none"
    clip: float | None = None
    late_lr: float = 0.0

    @property
    def name(self) -> str:
        """The contender, with what it compresses to."""
        if self.compress == "none":
            return self.contender
        return f"{self.contender}, {self.compress}"

    @property
    def named(self) -> str:
        """The name, with what a run does about late gradients."""
        return with_remedies(self.name, 0.0, self.late_lr, self.clip)

    @property
    def whole(self) -> bool:
        """Whether the recipe is trained to its end."""
        return self.minibatches == self.recipe.minibatches

    @property
    def model(self) -> str:
        """The model file, with the function that makes a model of so many blocks."""
        return f"{transformer.__file__}:{'build_deep' if self.stages == 8 else 'build_model'}"


@dataclass(frozen=True)
class Run:
    """What came of a case: the loss is on held-out data, seconds per minibatch are of the steady
    state.

    They are None where other work ran beside it.
    """

    case: Case
    seconds_per_minibatch: float | None
    seconds: float  # start-up, evaluation and drain included
    loss: float | None
    curve: tuple[float, ...]  # mean training losses of 20 minibatches each


def main() -> None:
    """Run what is asked for, and print and keep the results."""
    arguments = _arguments()
    recipe = Recipe(arguments.optimizer, arguments.rate, arguments.minibatches)
    if arguments.table:
        write_table(recipe, arguments.clip)
        return

    recipe.choose()
    with testbed(arguments.stages, computing=True) as bed:
        links = bed.links(flat_cluster(arguments.stages, parse_bandwidth(arguments.bandwidth)))
        for case in cases(arguments, recipe):
            run = train(bed, links, case)
            print(run, flush=True)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--contenders",
        default=";".join(CONTENDERS),
        help="separated by semicolons; 1f1b+int8 compresses what it sends",
    )
    add("--optimizer", default="newest-muon")
    add("--rate", type=float, default=0.016)
    add("--minibatches", type=int, default=400, help="of the recipe")
    add("--only", type=int, help="train so few of them, for the time")
    add("--stages", type=int, choices=(4, 8), default=4)
    add("--parts", type=int, default=4, help="microbatches of a minibatch, where it is divided")
    add("--seeds", default="0")
    add("--bandwidth", default="1Gbps")
    add("--clip", type=float, help="as --clip-grad-norm of plan train")
    add("--late-lr", type=float, default=0.0, help="as of plan train; synchronous runs have none")
    add("--table", action="store_true", help="train nothing; write links.md")
    return parser.parse_args()


def cases(arguments: argparse.Namespace, recipe: Recipe) -> Iterator[Case]:
    """Yield each contender with each seed."""
    for seed in map(int, arguments.seeds.split(",")):
        for name in arguments.contenders.split(";"):
            contender, _, compress = name.partition("+")
            stale = contender != DDP and find(contender).asynchronous
            yield Case(
                contender=contender,
                recipe=recipe,
                minibatches=arguments.only or arguments.minibatches,
                stages=arguments.stages,
                parts=arguments.parts,
                seed=seed,
                bandwidth=arguments.bandwidth,
                compress=compress or "none",
                clip=arguments.clip,
                late_lr=arguments.late_lr if stale else 0.0,
            )


def write_table(recipe: Recipe, clip: float | None) -> None:
    """Write links.md; the times to a loss are of this recipe."""
    runs = read()
    uncompressed = [run for run in runs if run.case.compress == "none"]
    tables = table(uncompressed), times(uncompressed, recipe, clip), compressed(runs)
    TABLE.write_text("\n\n".join(tables) + "\n", encoding="utf-8")


def train(bed: Testbed, links: Cluster, case: Case) -> Run:
    """Train a case in real processes."""
    options = TrainingOptions(
        evaluate_every=case.minibatches if case.whole and case.contender != DDP else None,
        drop_last=True,
        clip_grad_norm=case.clip,
        late_lr=case.late_lr,
    )
    job = Job(
        model=case.model,
        plan=plan_of(case, links),
        steps=case.minibatches,
        seed=case.seed,
        options=options,
        baseline="data-parallel" if case.contender == DDP else None,
    )
    result = bed.train(job, links, 1.0, TIMEOUT_S)
    return Run(
        case,
        seconds_per_minibatch=result.minibatch_size / result.samples_per_s,
        seconds=result.seconds,
        loss=result.evaluations[-1].loss if result.evaluations else None,
        curve=curve_of([math.nan if each.loss is None else each.loss for each in result.losses]),
    )


def plan_of(case: Case, links: Cluster) -> Plan:
    """Return a plan of a block per stage, of the depth that its schedule was published with; or of
    all on all.
    """
    if case.contender == DDP:
        profile = _estimate(case, case.stages)
        return given_plan(
            profile, links, [len(profile.layers)], [case.stages], "1f1b-flush", case.stages
        )
    parts = case.parts if find(case.contender).divides else 1
    profile = _estimate(case, parts)
    stages = [transformer.stage_of(layer.name, case.stages) for layer in profile.layers]
    links = links.model_copy(update={"compress": case.compress})
    counts = [stages.count(number) for number in range(case.stages)]
    return given_plan(
        profile, links, counts, [1] * case.stages, case.contender, parts, depth="published"
    )


def _estimate(case: Case, parts: int) -> Profile:
    return estimate(case.model, device="cpu", batch_size=transformer.MINIBATCH // parts)


def read() -> list[Run]:
    """Return what is known."""
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["case"]["recipe"] = Recipe(**row["case"]["recipe"])
        row["case"] = Case(**row["case"])
    return [Run(**row) for row in rows]


def table(runs: Sequence[Run]) -> str:
    """Return the mean losses over the seeds, and the median times, of trainings to the end."""
    together: defaultdict[Case, list[Run]] = defaultdict(list)
    for run in runs:
        if run.loss is not None:
            together[replace(run.case, seed=0)].append(run)
    rows = [
        (
            case.stages,
            case.recipe.minibatches,
            case.named,
            f"{case.recipe.optimizer}, {case.recipe.rate:g}",
            case.bandwidth,
            f"{fmean(run.loss for run in same if run.loss is not None):.3f}",
            len(same),
            _ms([run.seconds_per_minibatch for run in same], ".1f"),
        )
        for case, same in sorted(
            together.items(), key=lambda each: (each[0].stages, each[0].minibatches)
        )
    ]
    headers = (
        "stages",
        "minibatches",
        "schedule",
        "optimizer and rate",
        "links",
        "loss",
        "seeds",
        "ms per minibatch",
    )
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def alike(runs: Sequence[Run], recipe: Recipe, clip: float | None) -> list[Run]:
    """Return the runs with an optimizer at a rate, of any length, whose gradients are clipped to
    this norm.
    """
    wanted = recipe.optimizer, recipe.rate, clip
    return [
        run
        for run in runs
        if (run.case.recipe.optimizer, run.case.recipe.rate, run.case.clip) == wanted
    ]


def times(all_runs: Sequence[Run], recipe: Recipe, clip: float | None, stages: int = 4) -> str:
    """Return the times to the loss that 1f1b has at the end of a training with this recipe.

    A minibatch takes as long with any of the optimizers.
    """
    runs, minibatches = alike(all_runs, recipe, clip), recipe.minibatches
    rows = []
    target = mean_loss(runs, "1f1b", stages, minibatches)
    ours = to_loss(runs, "1f1b", stages, target)
    for bandwidth in dict.fromkeys(run.case.bandwidth for run in all_runs):
        seconds = {
            name: _least_s(all_runs, name, stages, bandwidth)
            for name in ("1f1b", "1f1b-flush", DDP)
        }
        for name, each_s in seconds.items():
            if each_s is not None and seconds["1f1b"] is not None:
                # DDP makes the same updates as the schedule that drains.
                needed = ours if name == "1f1b" else to_loss(runs, "1f1b-flush", stages, target)
                total_s = needed * each_s
                ratio = total_s / (ours * seconds["1f1b"])
                rows.append(
                    (
                        bandwidth,
                        name,
                        f"{needed:.0f}",
                        f"{1e3 * each_s:.1f}",
                        f"{total_s:.1f}",
                        f"{ratio:.2f}",
                    )
                )
    headers = (
        "links",
        "",
        f"minibatches to {target:.3f}",
        "ms per minibatch",
        "seconds",
        "of 1f1b's",
    )
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def compressed(runs: Sequence[Run]) -> str:
    """Return the seconds per minibatch with compressed messages, and without, by the links'
    bandwidth.
    """

    def setting(run: Run) -> Case:
        return replace(run.case, bandwidth="", contender="", compress="")

    settings = {setting(run) for run in runs if run.case.compress != "none" and not run.case.whole}
    known: defaultdict[str, defaultdict[str, list[float | None]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run in runs:
        if setting(run) in settings:
            known[run.case.name][run.case.bandwidth].append(run.seconds_per_minibatch)
    links = sorted({link for times in known.values() for link in times}, key=parse_bandwidth)
    rows = [[name] + [_ms(times[link], ".0f") for link in links] for name, times in known.items()]
    return tabulate(rows, ["ms per minibatch at", *links], tablefmt="github", disable_numparse=True)


def _ms(seconds: Sequence[float | None], form: str) -> str:
    """Return the median in milliseconds; nothing where there is none."""
    known = [each for each in seconds if each is not None]
    return f"{1e3 * median(known):{form}}" if known else ""


def mean_loss(runs: Sequence[Run], contender: str, stages: int, minibatches: int) -> float:
    return fmean(
        run.loss
        for run in runs
        if run.loss is not None
        and (run.case.contender, run.case.stages, run.case.minibatches)
        == (contender, stages, minibatches)
    )


def to_loss(runs: Sequence[Run], contender: str, stages: int, target: float) -> float:
    """Return the length of a training that ends at a loss, between those of trainings that were
    measured.
    """
    cases = [
        run.case
        for run in runs
        if (run.case.contender, run.case.stages) == (contender, stages) and run.loss
    ]
    lengths = sorted({case.minibatches for case in cases})
    losses = [mean_loss(runs, contender, stages, length) for length in lengths]
    return math.exp(
        np.interp(-target, [-loss for loss in losses], [math.log(length) for length in lengths])
    )


def _least_s(runs: Sequence[Run], contender: str, stages: int, bandwidth: str) -> float | None:
    """Return the seconds per minibatch of the fastest way to divide minibatches; None where nothing
    was measured.
    """
    by_parts: defaultdict[int, list[float]] = defaultdict(list)
    for run in runs:
        asked = (run.case.contender, run.case.stages, run.case.bandwidth) == (
            contender,
            stages,
            bandwidth,
        )
        if asked and run.seconds_per_minibatch is not None:
            by_parts[run.case.parts].append(run.seconds_per_minibatch)
    return min(map(median, by_parts.values()), default=None)


if __name__ == "__main__":
    main()
