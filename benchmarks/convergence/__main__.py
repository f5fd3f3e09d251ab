"""python -m benchmarks.convergence [--save]: every schedule trains two models as far as one process does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.convergence import characters, digits
from benchmarks.convergence.picture import curves_svg
from planner.api import estimate, train
from planner.cluster import flat_cluster
from planner.executor.job import TrainingOptions
from planner.model.file import load_model_file
from planner.plan_file import Plan, ScheduleName, SolverReport
from planner.pricing import Ledger, price
from planner.profile_file import Profile
from planner.solver.assemble import assemble
from planner.solver.baselines import equal_layers
from planner.solver.vertical_sync import synced_price

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "images"
STAGES, MICROBATCHES, SEED = 4, 4, 0
ACCURACY, WITHIN = 0.97, 0.02
DIVIDED: tuple[ScheduleName, ...] = ("2bw", "1f1b-flush", "zb-h1", "gpipe", "interleaved")
SCHEDULES = ("1f1b", "1f1b, vertical sync", "2bw", "1f1b-flush", "zb-h1", "gpipe", "interleaved", "naive")


@dataclass(frozen=True)
class Curve:
    """Held-out loss, and accuracy where there is one, after so many minibatches."""

    name: str
    minibatches: list[int]
    losses: list[float]
    accuracy: float | None


def main() -> None:
    """Run, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save", action="store_true", help="write results.json, results.md and the pictures of the docs"
    )
    parser.add_argument("--models", default="digits,characters")
    parser.add_argument("--schedules", default=";".join(SCHEDULES), help="separated by semicolons")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    lines = ["| model | schedule | held-out loss | against one process | accuracy | |", "|---|---|---|---|---|---|"]
    for module in (digits, characters):
        name = module.__name__.rpartition(".")[2]
        if name not in args.models.split(","):
            continue
        curves = [one_process(module)]
        for schedule in args.schedules.split(";"):
            curves.append(in_pipeline(module, schedule))
            print(name, schedule, curves[-1].losses[-1], curves[-1].accuracy, flush=True)
        lines += list(table(name, curves))
        results[name] = [asdict(curve) for curve in curves]
        if args.save:
            DOCS.mkdir(parents=True, exist_ok=True)
            title = f"{name}: held-out loss, {STAGES} stages"
            (DOCS / f"convergence-{name}.svg").write_text(curves_svg(title, curves_of(curves)), encoding="utf-8")
    print("\n".join(lines))
    if args.save:
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (HERE / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def curves_of(curves: list[Curve]) -> dict[str, list[tuple[float, float]]]:
    """For the picture."""
    return {curve.name: list(zip(map(float, curve.minibatches), curve.losses, strict=True)) for curve in curves}


def table(name: str, curves: list[Curve]) -> Iterator[str]:
    """A row per schedule; the last column says whether the aim is reached."""
    reference = curves[0].losses[-1]
    for curve in curves:
        loss, accuracy = curve.losses[-1], curve.accuracy
        if accuracy is None:
            reached, shown = loss <= (1 + WITHIN) * reference, ""
        else:
            reached, shown = accuracy >= ACCURACY, f"{accuracy:.1%}"
        verdict = "reached" if reached else "missed"
        yield f"| {name} | {curve.name} | {loss:.4f} | {loss / reference - 1:+.1%} | {shown} | {verdict} |"


def in_pipeline(module: ModuleType, schedule: str) -> Curve:
    """Train in worker processes on this machine."""
    kind, _, synced = schedule.partition(", ")
    plan = make_plan(module, kind, vertical_sync=bool(synced))  # type: ignore[arg-type]
    options = TrainingOptions(evaluate_every=module.EVERY, drop_last=True)
    result = train(str(module.__file__), plan, steps=module.MINIBATCHES, seed=SEED, options=options)
    losses = [float("nan") if each.loss is None else each.loss for each in result.evaluations]
    accuracy = result.evaluations[-1].metrics.get("accuracy")
    return Curve(schedule, [each.minibatch for each in result.evaluations], losses, accuracy)


def make_plan(module: ModuleType, schedule: ScheduleName, *, vertical_sync: bool) -> Plan:
    """Stages of as many layers each; what they cost does not matter here."""
    microbatches = MICROBATCHES if schedule in DIVIDED else 1
    profile: Profile = estimate(str(module.__file__), device="cpu", batch_size=module.MINIBATCH // microbatches)
    chunks = 2 if schedule == "interleaved" else 1
    ledger, cluster = Ledger(profile), flat_cluster(STAGES // chunks, 1e9)
    stages = equal_layers(ledger, STAGES)
    cost = price(ledger, stages, cluster, schedule=schedule, microbatches=microbatches, chunks=chunks)
    if vertical_sync:
        cost = synced_price(ledger, stages, cost)
    report = SolverReport(
        name="equal layers", cost_model="resource", status="feasible", lower_bound_s=0.0, gap=1.0, seconds=0.0
    )
    plan = assemble(ledger, cluster, stages, cost, schedule, microbatches, report)
    return plan.model_copy(update={"vertical_sync": vertical_sync})


def one_process(module: ModuleType) -> Curve:
    """Plain PyTorch, on the same data in another order."""
    torch.manual_seed(SEED)
    file = load_model_file(str(module.__file__))
    model = file.build_model()
    optimizer = file.optimizer(dict(model.named_parameters()))
    scheduler = file.scheduler(optimizer)
    assert scheduler is not None
    done, minibatches, losses, accuracy = 0, [], [], None
    while done < module.MINIBATCHES:
        for inputs, target in DataLoader(module.dataset(), module.MINIBATCH, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            torch.autograd.backward(module.loss(model(inputs), target))
            optimizer.step()
            scheduler.step()
            done += 1
            if done % module.EVERY == 0 or done == module.MINIBATCHES:
                loss, accuracy = evaluate(module, model, module.evaluation_dataset())
                minibatches.append(done)
                losses.append(loss)
            if done == module.MINIBATCHES:
                break
    return Curve("one process", minibatches, losses, accuracy)


def evaluate(module: ModuleType, model: nn.Module, data: Dataset[object]) -> tuple[float, float | None]:
    """Mean loss, and accuracy where the file has metrics."""
    loss, right, count = 0.0, 0.0, 0
    with torch.no_grad():
        for inputs, target in DataLoader(data, 256):
            output = model.eval()(inputs)
            loss += float(module.loss(output, target)) * len(inputs)
            right += (
                float(module.metrics(output, target)["accuracy"]) * len(inputs) if hasattr(module, "metrics") else 0
            )
            count += len(inputs)
    model.train()
    return loss / count, right / count if hasattr(module, "metrics") else None


if __name__ == "__main__":
    main()
