"""A user's script under torchrun: train two models with a custom loop, and write a report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import planner
from planner.executor.communication.control import join_group
from tests.executor import eager

CHANGES = 3  # minibatches before a drain in the middle


def main(folder: Path) -> None:
    """Train what `folder` has plans for."""
    torch.set_num_threads(1)
    join_group()  # here, because several pipelines use the group in turn
    report = {}
    for name in sorted(path.stem for path in folder.glob("*.plan")):
        plan, path = planner.load_plan(folder / f"{name}.plan"), folder / "language_momentum.py"
        spec = planner.load_model_file(path)
        batches = eager.minibatches(spec, 4 * plan.microbatches, 1)
        with planner.pipeline(plan, path, seed=eager.SEED) as pipeline:
            losses = [pipeline.step((b.args, b.kwargs, b.target)) for b in batches[:CHANGES]]
            losses.append(pipeline.drain())
            losses += [pipeline.step((b.args, b.kwargs, b.target)) for b in batches[CHANGES:]]
            losses.append(pipeline.drain())
            pipeline.save_weights(folder / f"{name}.weights")
            report[name] = {
                "returned": losses,
                "all": [pipeline.losses[number] for number in range(len(batches))],
            }
    rank = dist.get_rank()
    (folder / f"report-{rank}.json").write_text(json.dumps(report), encoding="utf-8")
    in_memory(folder)
    dist.destroy_process_group()


def in_memory(folder: Path) -> None:
    """Train a model that the script builds itself."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    )
    file = planner.in_memory(
        model,
        example_batch=(torch.randn(1, 6), torch.randn(1, 1)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    plan = planner.load_plan(folder / "memory.json")
    generator = torch.Generator().manual_seed(1)
    with planner.pipeline(plan, file) as pipeline:
        for _ in range(4):
            pipeline.step(
                (torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator))
            )
        pipeline.save_weights(folder / "memory.weights")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
