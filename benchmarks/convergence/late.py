"""Compare optimizers under late gradients: python -m benchmarks.convergence.late --help.

Every training is one process that delays gradients as the pipeline does, see `emulation.py`.
Results are added to late.jsonl, a line each. Trainings that are there already are not repeated, and
several commands may run at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from tabulate import tabulate

from benchmarks.convergence import transformer
from benchmarks.convergence.emulation import evaluate, lateness, train
from benchmarks.convergence.recipes import Recipe, with_remedies
from planner.formats.names import CodecName

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "late.jsonl", HERE / "late.md"
SCHEDULES = ("synchronous", "1f1b", "2bw")
PART = 20  # minibatches whose mean loss is a point of a curve


@dataclass(frozen=True)
class Case:
    """One training: a recipe under a schedule."""

    recipe: Recipe
    schedule: str
    stages: int  # as many as the model has blocks
    seed: int
    synchronous_start: float = 0.0  # share of the minibatches whose gradients are not late
    compress: CodecName = "none"  # what the stages send
    clip: float | None = None  # --clip-grad-norm
    late_lr: float = 0.0  # --late-lr


@dataclass(frozen=True)
class Trained:
    """What became of a case.

    Attributes:
        loss: on held-out data.
        curve: mean training losses of `PART` minibatches each.
    """

    case: Case
    loss: float
    curve: tuple[float, ...]


def trained(case: Case) -> Trained:
    """Train a case."""
    case.recipe.choose()
    minibatches = case.recipe.minibatches
    losses: list[float] = []
    model = train(
        transformer,
        minibatches,
        case.seed,
        lambda _, __, loss: losses.append(loss),
        builder="build_deep" if case.stages == 8 else "build_model",
        late=lateness(case.schedule, case.stages),
        start=round(case.synchronous_start * minibatches),
        compress=case.compress,
        clip=case.clip,
        late_lr=case.late_lr,
    )
    loss, _ = evaluate(transformer, model, transformer.evaluation_dataset())
    return Trained(case, round(loss, 5), curve_of(losses))


def curve_of(losses: Sequence[float]) -> tuple[float, ...]:
    """Return the means of `PART` losses each."""
    return tuple(
        round(fmean(losses[first : first + PART]), 4) for first in range(0, len(losses), PART)
    )


def main() -> None:
    """Train the cases that are asked for and are not in late.jsonl, or write the table of those
    there.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizers", default="newest-muon", help="separated by semicolons")
    parser.add_argument("--schedules", default=";".join(SCHEDULES))
    parser.add_argument("--stages", default="4", help="4, 8 or both, with a comma between")
    parser.add_argument("--rates", default="0.016")
    parser.add_argument("--minibatches", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--synchronous-start", type=float, default=0.0)
    parser.add_argument("--compress", default="none", help="separated by semicolons")
    parser.add_argument("--clip", type=float, help="as --clip-grad-norm of plan train")
    parser.add_argument(
        "--late-lr", type=float, default=0.0, help="as of plan train; synchronous runs have none"
    )
    parser.add_argument("--table", action="store_true", help="train nothing; write late.md")
    args = parser.parse_args()
    if args.table:
        plain = [each for each in read() if each.case.compress == "none"]
        TABLE.write_text(f"{table(plain)}\n\n{compressed(read())}\n", encoding="utf-8")
        return
    torch.set_num_threads(1)
    lists = (each.split(";") for each in (args.optimizers, args.schedules, args.compress))
    choices = product(map(int, args.stages.split(",")), args.rates.split(","), *lists)
    for seed, (stages, rate, name, schedule, codec) in product(range(args.seeds), choices):
        recipe = Recipe(name, float(rate), args.minibatches)
        late_lr = 0.0 if schedule == "synchronous" else args.late_lr
        case = Case(
            recipe,
            schedule,
            stages,
            seed,
            args.synchronous_start,
            codec,
            args.clip,
            late_lr,
        )
        if all(case != each.case for each in read()):
            began = time.perf_counter()
            result = trained(case)
            print(f"{result.loss:.4f} {time.perf_counter() - began:.0f} s {case}", flush=True)
            keep(result)


def keep(result: Trained) -> None:
    """Add a result to late.jsonl."""
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read() -> list[Trained]:
    """Return what is known, in the order of trainings."""
    if not RESULTS.exists():
        return []
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["case"]["recipe"] = Recipe(**row["case"]["recipe"])
        row["case"] = Case(**row["case"])
        row["curve"] = tuple(row["curve"])
    return [Trained(**row) for row in rows]


def means(results: Sequence[Trained]) -> dict[Case, tuple[float, int]]:
    """Return the mean loss over the seeds, and how many there are, by case with seed 0."""
    losses: dict[Case, list[float]] = {}
    for each in results:
        losses.setdefault(replace(each.case, seed=0), []).append(each.loss)
    return {case: (fmean(values), len(values)) for case, values in losses.items()}


def best(results: Sequence[Trained]) -> dict[Case, tuple[float, int]]:
    """Return of `means` the best rate of each optimizer in each setting.

    The rate is chosen among those that have most seeds.
    """
    found: dict[Case, tuple[float, int]] = {}
    chosen: dict[Case, Case] = {}
    for case, (loss, seeds) in means(results).items():
        setting = replace(case, recipe=replace(case.recipe, rate=0.0))
        before = chosen.get(setting)
        if before is None or (-seeds, loss) < (-found[before][1], found[before][0]):
            found.pop(before, None) if before is not None else None
            chosen[setting], found[case] = case, (loss, seeds)
    return found


def table(results: Sequence[Trained]) -> str:
    """Return a table of the best rate of each optimizer, beside the same recipe and the best one
    without delay.
    """
    headers = ["stages", "minibatches", "schedule", "optimizer", "rate", "seeds", "loss"]
    headers += ["the same, synchronous", "", "best synchronous", ""]
    return tabulate(list(_rows(results)), headers, tablefmt="github", disable_numparse=True)


def _rows(results: Sequence[Trained]) -> Iterator[list[str]]:
    known, chosen = means(results), best(results)
    settings = sorted(
        chosen, key=lambda c: (c.stages, c.recipe.minibatches, SCHEDULES.index(c.schedule))
    )
    for case in settings:
        loss, seeds = chosen[case]
        same = known.get(replace(case, schedule="synchronous", synchronous_start=0.0, late_lr=0.0))
        alike = [
            each
            for other, each in chosen.items()
            if other.schedule == "synchronous"
            and other.stages == case.stages
            and other.recipe.minibatches == case.recipe.minibatches
        ]
        columns = [
            case.stages,
            case.recipe.minibatches,
            named(case),
            case.recipe.optimizer,
        ]
        columns += [f"{case.recipe.rate:g}", seeds, f"{loss:.3f}"]
        yield (
            [str(each) for each in columns]
            + _beside(loss, same)
            + _beside(loss, min(alike, default=None))
        )


def compressed(results: Sequence[Trained]) -> str:
    """Return a table of trainings whose stages compress what they send, beside the same ones that
    do not.
    """
    losses = {each.case: each.loss for each in results}
    # by the case with seed 0: without, and with
    rows: defaultdict[Case, list[tuple[float, float]]] = defaultdict(list)
    for case, loss in losses.items():
        if (
            case.compress != "none"
            and (plain := losses.get(replace(case, compress="none"))) is not None
        ):
            rows[replace(case, seed=0)].append((plain, loss))
    headers = [
        "stages",
        "minibatches",
        "schedule",
        "optimizer",
        "compress",
        "seeds",
        "loss",
        "uncompressed",
    ]
    headers += ["", "by seed"]
    return tabulate(
        [_compressed_row(*each) for each in rows.items()], headers, "github", disable_numparse=True
    )


def _compressed_row(case: Case, losses: Sequence[tuple[float, float]]) -> list[str]:
    plain, loss = map(fmean, zip(*losses, strict=True))
    each = ", ".join(f"{one / other - 1:+.2%}" for other, one in losses)
    columns: list[object] = [case.stages, case.recipe.minibatches, named(case)]
    columns += [case.recipe.optimizer, case.compress, len(losses)]
    return [*map(str, columns), f"{loss:.3f}", f"{plain:.3f}", f"{loss / plain - 1:+.2%}", each]


def named(case: Case) -> str:
    """Return the schedule with its start, and what it does about gradients."""
    return with_remedies(case.schedule, case.synchronous_start, case.late_lr, case.clip)


def _beside(loss: float, other: tuple[float, int] | None) -> list[str]:
    return ["", ""] if other is None else [f"{other[0]:.3f}", f"{loss / other[0] - 1:+.1%}"]


if __name__ == "__main__":
    main()
