"""Train with late gradients in one process: exactly what the stages of an asynchronous pipeline compute.

Under `1f1b` with weight stashing stage s of S computes minibatch m, forward and backward, at the weights after
m − (S − 1 − s) updates, and applies the gradient to its newest weights (Narayanan et al., "PipeDream", SOSP'19, section
3.3). Under `2bw` all stages compute it at the weights before the last update (Narayanan et al., "Memory-Efficient
Pipeline-Parallel DNN Training", ICML'21, section 3.1). One process keeps those older weights, and puts them in place
for the forward and the backward.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.convergence import transformer
from benchmarks.convergence.recipes import Recipe, schedule_of
from planner.executor.run.data import make_batches
from planner.model.spec import load_model_file
from planner.schedule.instructions import Unit

RESULTS = Path(__file__).parent / "late.json"
SCHEDULES = ("synchronous", "1f1b", "2bw")


@dataclass(frozen=True)
class Case:
    """One training: a recipe under a schedule."""

    recipe: Recipe
    schedule: str
    stages: int  # as many as the model has blocks
    seed: int
    synchronous_start: float = 0.0  # share of the minibatches whose gradients are not late


def lateness(case: Case) -> list[int]:
    """Return how many updates late each stage's gradients are."""
    if case.schedule == "synchronous":
        return [0] * case.stages
    if case.schedule == "2bw":
        return [1] * case.stages
    return list(range(case.stages - 1, -1, -1))


def stage_of(name: str, stages: int) -> int:
    """Return the stage of a parameter: a block each; tables go with the first, norm and head with the last."""
    if name.startswith("blocks."):
        return int(name.split(".")[1])
    return 0 if name.startswith(("characters", "positions")) else stages - 1


class LateWeights:
    """The weights of each stage after the last updates, and the older ones among them that a minibatch is to use.

    Args:
        stages: the parameters of each.
        late: how many updates late the gradients of each are.
    """

    def __init__(self, stages: Sequence[Sequence[nn.Parameter]], late: Sequence[int]) -> None:
        self._stages = stages
        self._older: list[deque[list[Tensor]]] = [deque(maxlen=max(updates, 1)) for updates in late]
        self._late = late
        self._newest: list[list[Tensor]] = []

    def put_older(self) -> None:
        """Give every stage the weights that its next minibatch is computed at."""
        self._newest = [[parameter.data for parameter in stage] for stage in self._stages]
        for stage, older, late in zip(self._stages, self._older, self._late, strict=True):
            if late and older:
                for parameter, data in zip(stage, older[0], strict=True):
                    parameter.data = data

    def put_newest(self) -> None:
        """Give every stage its newest weights, and keep a copy of them, because they are about to be updated."""
        for stage, older, newest, late in zip(self._stages, self._older, self._newest, self._late, strict=True):
            for parameter, data in zip(stage, newest, strict=True):
                parameter.data = data
            if late:
                older.append([data.clone() for data in newest])


def train(case: Case) -> float:
    """Return the loss on held-out data after a training."""
    builder = "build_model" if case.stages == 4 else "build_deep"
    file = load_model_file(f"{transformer.__file__}:{builder}")
    torch.manual_seed(case.seed)
    model = file.build_model()
    optimizer = case.recipe.build(model.named_parameters())
    scheduler = schedule_of(optimizer, case.recipe.minibatches)
    batches = make_batches(file, transformer.MINIBATCH, 1, case.seed, drop_last=True)
    stages: list[list[nn.Parameter]] = [[] for _ in range(case.stages)]
    for name, parameter in model.named_parameters():
        stages[stage_of(name, case.stages)].append(parameter)
    weights = LateWeights(stages, lateness(case))
    start = round(case.synchronous_start * case.recipe.minibatches)
    for minibatch in range(case.recipe.minibatches):
        batch = batches.batch(Unit(minibatch))
        optimizer.zero_grad()
        late = minibatch >= start
        if late:
            weights.put_older()
        torch.autograd.backward(transformer.loss(model(*batch.args), batch.target))
        if late:
            weights.put_newest()
        optimizer.step()
        scheduler.step()
    return held_out(model, transformer.evaluation_dataset())


def held_out(model: nn.Module, data: Dataset[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss."""
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, target in DataLoader(data, 256):
            total += float(transformer.loss(model(inputs), target)) * len(inputs)
            count += len(inputs)
    return total / count


def main() -> None:
    """Train the cases that are asked for and are not in late.json, and add them to it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizers", default="newest-muon", help="separated by semicolons")
    parser.add_argument("--schedules", default=";".join(SCHEDULES))
    parser.add_argument("--stages", default="4")
    parser.add_argument("--rates", default="0.002")
    parser.add_argument("--minibatches", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--synchronous-start", type=float, default=0.0)
    parser.add_argument("--table", action="store_true", help="train nothing; print the table of late.json")
    args = parser.parse_args()
    if args.table:
        print(table(read()))
        return
    torch.set_num_threads(1)
    cases = [
        Case(Recipe(name, float(rate), args.minibatches), schedule, int(stages), seed, args.synchronous_start)
        for stages in args.stages.split(",")
        for name in args.optimizers.split(";")
        for schedule in args.schedules.split(";")
        for rate in args.rates.split(",")
        for seed in range(args.seeds)
    ]
    for case in cases:
        if key(case) not in read():
            began = time.perf_counter()
            loss = train(case)
            print(f"{loss:.4f} {time.perf_counter() - began:.0f} s {key(case)}", flush=True)
            known = read() | {key(case): loss}  # another process may have written meanwhile
            RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def table(losses: dict[str, float]) -> str:
    """Return for each setting and optimizer the best rate's mean loss over the seeds that every rate has."""
    found: defaultdict[tuple[int, int, str], defaultdict[str, dict[float, list[float]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for text, loss in losses.items():
        case = json.loads(text)
        start = case["synchronous_start"]
        schedule = case["schedule"] + (f", first {start:.0%} synchronous" if start else "")
        setting = case["stages"], case["recipe"]["minibatches"], schedule
        rates = found[setting][case["recipe"]["optimizer"]]
        rates.setdefault(case["recipe"]["rate"], []).append(loss)
    rows = ["| stages | minibatches | schedule | optimizer | rate | loss | seeds |", "|---|---|---|---|---|---|---|"]
    for (stages, minibatches, schedule), optimizers in sorted(found.items()):
        for name, rates in optimizers.items():
            # The rate is chosen by the first seed, which all rates have; more seeds are for the one that is chosen.
            rate = min(rates, key=lambda each: rates[each][0])
            mean = sum(rates[rate]) / len(rates[rate])
            rows.append(
                f"| {stages} | {minibatches} | {schedule} | {name} | {rate:g} | {mean:.3f} | {len(rates[rate])} |"
            )
    return "\n".join(rows)


def key(case: Case) -> str:
    """Return the name of a case in late.json."""
    return json.dumps(asdict(case), sort_keys=True)


def read() -> dict[str, float]:
    """Return the losses that are known, by case."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


if __name__ == "__main__":
    main()
