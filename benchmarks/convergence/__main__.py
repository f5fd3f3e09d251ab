"""Compare how far each schedule trains two models with a single process: python -m
benchmarks.convergence [--save].
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from benchmarks.convergence import characters, digits
from benchmarks.convergence.emulation import evaluate
from benchmarks.convergence.emulation import train as train_alone
from benchmarks.convergence.picture import curves_svg
from planner.api.running import estimate, train
from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.schedule.registry import find
from planner.solver.assemble import GIVEN, assemble
from planner.solver.by_hand import equal_counts
from planner.solver.evaluate.evaluation import priced
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import uncut_groups

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
DOCS = HERE.parents[1] / "docs" / "images"
STAGES, MICROBATCHES, SEED = 4, 4, 0
ACCURACY, WITHIN = 0.97, 0.02
DIVIDED: tuple[str, ...] = ("2bw", "1f1b-flush", "zb-h1", "gpipe", "interleaved")
ONE_PROCESS = "one process"
SCHEDULES = ("1f1b", "2bw", "1f1b-flush", "zb-h1", "gpipe", "interleaved")


@dataclass(frozen=True)
class Curve:
    """Held-out loss after each of `minibatches`, and the final accuracy if the model has one."""

    name: str
    minibatches: list[int]
    losses: list[float]
    accuracy: float | None


@dataclass(frozen=True)
class Measured:
    """The curves of a model and its training setting."""

    setting: str
    curves: list[Curve]


def main() -> None:
    """Train, print the table, and save it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save",
        action="store_true",
        help="write results.json, results.md and the pictures of the docs",
    )
    parser.add_argument("--models", default="digits,characters")
    parser.add_argument(
        "--schedules",
        default=";".join((ONE_PROCESS, *SCHEDULES)),
        help="separated by semicolons; --save keeps the other curves that results.json has of the "
        "same setting",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = read_results()
    for module in (digits, characters):
        name = module.__name__.rpartition(".")[2]
        if name not in args.models.split(","):
            continue
        for schedule in args.schedules.split(";"):
            curve = (
                one_process(module) if schedule == ONE_PROCESS else in_pipeline(module, schedule)
            )
            print(name, schedule, curve.losses[-1], curve.accuracy, flush=True)
            if args.save:
                results = read_results()  # another process may have written it meanwhile
            known = results.get(name)
            kept = known.curves if known is not None and known.setting == module.SETTING else []
            results[name] = Measured(
                module.SETTING, ordered([*(c for c in kept if c.name != schedule), curve])
            )
            if args.save:
                save(results)
    print(markdown(results))


def ordered(curves: list[Curve]) -> list[Curve]:
    """Sort the curves: one process first, then in the order of `SCHEDULES`."""
    names = (ONE_PROCESS, *SCHEDULES)
    return sorted(curves, key=lambda curve: names.index(curve.name))


def read_results() -> dict[str, Measured]:
    """Return the contents of results.json."""
    if not RESULTS.exists():
        return {}
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {
        name: Measured(each["setting"], [Curve(**curve) for curve in each["curves"]])
        for name, each in content.items()
    }


def save(results: dict[str, Measured]) -> None:
    """Write results, tables and pictures."""
    content = json.dumps({name: asdict(each) for name, each in results.items()}, indent=1)
    RESULTS.write_text(content + "\n", encoding="utf-8")
    (HERE / "results.md").write_text(markdown(results) + "\n", encoding="utf-8")
    DOCS.mkdir(parents=True, exist_ok=True)
    for name, each in results.items():
        picture = curves_svg(f"{name}: held-out loss, {STAGES} stages", curves_of(each.curves))
        (DOCS / f"convergence-{name}.svg").write_text(picture, encoding="utf-8")


def markdown(results: dict[str, Measured]) -> str:
    """Return the table of all results."""
    head = [
        "| model | schedule | held-out loss | against one process | accuracy | |",
        "|---|---|---|---|---|---|",
    ]
    rows = [row for name, each in results.items() for row in table(name, each.curves)]
    return "\n".join(
        [*head, *rows, "", *(f"{name}: {each.setting}.\n" for name, each in results.items())]
    ).rstrip()


def curves_of(curves: list[Curve]) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each curve for the picture."""
    return {
        curve.name: list(zip(map(float, curve.minibatches), curve.losses, strict=True))
        for curve in curves
    }


def table(name: str, curves: list[Curve]) -> Iterator[str]:
    """Yield a row per schedule; the last column says whether the aim is reached."""
    reference = curves[0].losses[-1] if curves[0].name == ONE_PROCESS else math.nan
    for curve in curves:
        loss, accuracy = curve.losses[-1], curve.accuracy
        if accuracy is None:
            reached, shown = loss <= (1 + WITHIN) * reference, ""
        else:
            reached, shown = accuracy >= ACCURACY, f"{accuracy:.1%}"
        verdict = "reached" if reached else "missed"
        yield (
            f"| {name} | {curve.name} | {loss:.4f} | {loss / reference - 1:+.1%} | {shown} | "
            f"{verdict} |"
        )


def in_pipeline(module: ModuleType, schedule: str) -> Curve:
    """Train with a schedule in worker processes on this machine."""
    plan = make_plan(module, schedule)
    result = train(
        str(module.__file__),
        plan,
        steps=module.MINIBATCHES,
        seed=SEED,
        evaluate_every=module.EVERY,
        drop_last=True,
    )
    losses = [float("nan") if each.loss is None else each.loss for each in result.evaluations]
    accuracy = result.evaluations[-1].metrics.get("accuracy")
    return Curve(schedule, [each.minibatch for each in result.evaluations], losses, accuracy)


def make_plan(module: ModuleType, schedule: str) -> Plan:
    """Return a plan of stages with equal numbers of layers, because their cost does not matter
    here.
    """
    microbatches = MICROBATCHES if schedule in DIVIDED else 1
    profile: Profile = estimate(
        str(module.__file__), device="cpu", batch_size=module.MINIBATCH // microbatches
    )
    chunks = 2 if schedule == "interleaved" else 1
    layer_costs, cluster = LayerCosts(profile), flat_cluster(STAGES // chunks, 1e9)
    problem = Problem(layer_costs, Setting(cluster, find(schedule), microbatches, chunks))
    groups = uncut_groups(layer_costs)
    ends = [0, *accumulate(equal_counts(len(groups), STAGES))]
    cut = [
        [layer for group in groups[first:end] for layer in group] for first, end in pairwise(ends)
    ]
    chosen = priced(problem, candidates(cut, [1] * STAGES))
    report = GIVEN.model_copy(update={"name": "equal layers"})
    return assemble(problem, chosen, report)


def one_process(module: ModuleType) -> Curve:
    """Train in a plain loop, from the same initial weights, on the same minibatches."""
    curve = Curve(ONE_PROCESS, [], [], None)

    def observe(done: int, model: nn.Module, _: float) -> None:
        if done % module.EVERY == 0 or done == module.MINIBATCHES:
            curve.minibatches.append(done)
            curve.losses.append(evaluate(module, model, module.evaluation_dataset())[0])

    model = train_alone(module, module.MINIBATCHES, SEED, observe)
    return replace(curve, accuracy=evaluate(module, model, module.evaluation_dataset())[1])


if __name__ == "__main__":
    main()
