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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from tabulate import tabulate

from benchmarks.convergence import transformer
from benchmarks.convergence.late import curve_of
from benchmarks.convergence.recipes import Recipe, with_remedies
from benchmarks.convergence.replicas import Replicas
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
DDP, LOCAL = "DDP", "local"
CONTENDERS = ("1f1b", "2bw", "1f1b-flush", DDP)
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        contender: a schedule, `DDP`, or `LOCAL` for local updates.
        recipe: of the whole training.
        minibatches: trained of it; where only the time is of interest, a few.
        stages: of a block each, one per worker; for `DDP` and `LOCAL`, workers.
        parts: microbatches of a minibatch, where the schedule divides it.
        seed: of first weights and data.
        bandwidth: of each worker's link.
        clip: `--clip-grad-norm`.
        late_lr: `--late-lr`.
        compress: what stages send; for `DDP` "PowerSGD" and a rank, for `LOCAL` minibatches between
            two agreements.
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
        if self.contender == LOCAL:
            return f"local updates, {self.compress} minibatches each"
        return self.contender + (f", {self.compress}" if self.compress != "none" else "")

    @property
    def named(self) -> str:
        """The name, with what a run does about late gradients."""
        return with_remedies(self.name, 0.0, self.late_lr, self.clip)

    @property
    def whole(self) -> bool:
        """Whether the recipe is trained to its end."""
        return self.minibatches == self.recipe.minibatches

    @property
    def compared(self) -> bool:
        """Whether it is not in the product, and so has a loop of `replicas.py`."""
        return self.contender == LOCAL or self.compress.startswith("PowerSGD")

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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = (
        "separated by semicolons; 1f1b+int8 and DDP+PowerSGD4 compress what they send, "
        "local+16 sends seldom"
    )
    parser.add_argument("--contenders", default=";".join(CONTENDERS), help=words)
    parser.add_argument("--optimizer", default="newest-muon")
    parser.add_argument("--rate", type=float, default=0.016)
    parser.add_argument("--minibatches", type=int, default=400, help="of the recipe")
    parser.add_argument("--only", type=int, help="train so few of them, for the time")
    parser.add_argument("--stages", type=int, choices=(4, 8), default=4)
    parser.add_argument(
        "--parts", type=int, default=4, help="microbatches of a minibatch, where it is divided"
    )
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--bandwidth", default="1Gbps")
    parser.add_argument("--clip", type=float, help="as --clip-grad-norm of plan train")
    parser.add_argument(
        "--late-lr", type=float, default=0.0, help="as of plan train; synchronous runs have none"
    )
    parser.add_argument(
        "--loss-only", action="store_true", help="keep no times, because other work runs, too"
    )
    parser.add_argument("--table", action="store_true", help="train nothing; write links.md")
    args = parser.parse_args()
    if args.table:
        plain = [run for run in read() if run.case.compress == "none"]
        recipe = Recipe(args.optimizer, args.rate, args.minibatches)
        tables = table(plain), times(plain, recipe, args.clip), compressed(read()), losses(read())
        TABLE.write_text("\n\n".join(tables) + "\n", encoding="utf-8")
        return
    recipe = Recipe(args.optimizer, args.rate, args.minibatches)
    recipe.choose()
    with testbed(args.stages, computing=True) as bed:
        links = bed.links(flat_cluster(args.stages, parse_bandwidth(args.bandwidth)))
        for seed in map(int, args.seeds.split(",")):
            for name in args.contenders.split(";"):
                contender, _, compress = name.partition("+")
                late = contender not in (DDP, LOCAL) and find(contender).asynchronous
                minibatches = args.only or args.minibatches
                case = Case(
                    contender, recipe, minibatches, args.stages, args.parts, seed, args.bandwidth
                )
                late_lr = args.late_lr if late else 0.0
                case = replace(case, compress=compress or "none", clip=args.clip, late_lr=late_lr)
                run = train_replicas(bed, links, case) if case.compared else train(bed, links, case)
                if args.loss_only:
                    run = replace(run, seconds_per_minibatch=None)
                print(run, flush=True)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(run)) + "\n")


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


def train_replicas(bed: Testbed, links: Cluster, case: Case) -> Run:
    """Train what `replicas.py` has."""
    rank, local = (
        (0, int(case.compress))
        if case.contender == LOCAL
        else (int(case.compress[len("PowerSGD") :]), 0)
    )
    asked = Replicas(
        case.model, case.recipe, case.minibatches, case.seed, power_sgd=rank, local=local
    )
    answer = bed.call(
        "benchmarks.convergence.replicas:train", {"replicas": asdict(asked)}, links, TIMEOUT_S
    )
    return Run(
        case,
        answer["seconds_per_minibatch"],
        answer["seconds"],
        loss=answer["loss"] if case.whole else None,
        curve=curve_of(answer["losses"]),
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


def losses(runs: Sequence[Run]) -> str:
    """Return the losses of whole trainings of 400 minibatches that compress, or send seldom, by
    optimizer.
    """
    known: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        if run.loss is not None and run.case.compress != "none" and run.case.minibatches == 400:
            known[run.case.name, f"{run.case.recipe.optimizer}, {run.case.recipe.rate:g}"].append(
                run.loss
            )
    rows = [(*key, f"{fmean(each):.3f}", len(each)) for key, each in known.items()]
    return tabulate(
        rows, ["after 400 minibatches", "optimizer and rate", "loss", "seeds"], tablefmt="github"
    )


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
