"""Loops of a user's own, whose ranks may differ: each worker runs one of `LOOPS`, and writes what
came of it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported by a star import
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import planner
from planner.executor.run.pipeline import Pipeline
from tests.executor.processes import _ENVIRONMENT, _HOST, TIMEOUT_S, _warm, run_to_end

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(
        nn.Linear(4, 32),
        nn.Dropout(0.05),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 1),
    )

def example_batch(n):
    x = torch.randn(n, 4)
    return (x,), x.sum(1, keepdim=True)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.01)
"""
SIZE, MINIBATCHES = 8, 6
HANG_TIMEOUT_S = 6.0
RANK, WORLD = "RANK", "WORLD_SIZE"

Minibatch = tuple[tuple[torch.Tensor, ...], torch.Tensor]
Loop = Callable[[Pipeline, int], None]


def dataset(minibatches: int = MINIBATCHES) -> TensorDataset:
    """Return the same samples on all ranks."""
    inputs = torch.randn(minibatches * SIZE, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def minibatches(**options: Any) -> Iterator[Minibatch]:
    """Yield the minibatches of a loader with such options."""
    for inputs, sums in DataLoader(dataset(), SIZE, **options):
        yield (inputs,), sums


def same(pipeline: Pipeline, rank: int) -> None:
    """The loaders shuffle by a generator with the same seed, as a hint says."""
    for minibatch in minibatches(shuffle=True, generator=torch.Generator().manual_seed(0)):
        pipeline.step(minibatch)


def shuffled(pipeline: Pipeline, rank: int) -> None:
    """The loaders shuffle by generators that went on differently."""
    first, *others = minibatches()
    pipeline.step(first)
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(0)).tolist()
    for index in order[rank:] + order[:rank]:
        pipeline.step(others[index])


def sampled(pipeline: Pipeline, rank: int) -> None:
    """Each rank has a part of the samples, as under DistributedDataParallel."""
    for minibatch in minibatches(
        sampler=DistributedSampler(dataset(), int(os.environ[WORLD]), rank)
    ):
        pipeline.step(minibatch)


def reordered(pipeline: Pipeline, rank: int) -> None:
    """The third minibatch has the same samples in another order."""
    for number, (arguments, sums) in enumerate(minibatches()):
        order = torch.arange(SIZE).flip(0) if (rank, number) == (1, 2) else torch.arange(SIZE)
        pipeline.step(((arguments[0][order],), sums[order]))


def smaller(pipeline: Pipeline, rank: int) -> None:
    """The third minibatch has fewer samples on one rank."""
    for number, (arguments, sums) in enumerate(minibatches()):
        size = 4 if (rank, number) == (1, 2) else SIZE
        pipeline.step(((arguments[0][:size],), sums[:size]))


def short(pipeline: Pipeline, rank: int) -> None:
    """A loader ends earlier on one rank."""
    for number, minibatch in enumerate(minibatches()):
        if (rank, number) == (1, 3):
            break
        pipeline.step(minibatch)


def uneven(pipeline: Pipeline, rank: int) -> None:
    """An epoch is shorter on one rank, which goes on with the next one."""
    for _ in range(2):
        for number, minibatch in enumerate(minibatches()):
            if (rank, number) == (1, 3):
                break
            pipeline.step(minibatch)


def evaluated_otherwise(pipeline: Pipeline, rank: int) -> None:
    """The second batch of the evaluation differs."""
    first, second, *_ = minibatches()
    pipeline.step(first)
    batches = [first, second if rank == 0 else ((-second[0][0],), second[1])]
    pipeline.evaluate([((arguments[0][:4],), sums[:4]) for arguments, sums in batches])


def evaluated_shorter(pipeline: Pipeline, rank: int) -> None:
    """One rank has a batch more for the evaluation."""
    first, *_ = minibatches()
    pipeline.step(first)
    batch = (first[0][0][:4],), first[1][:4]
    pipeline.evaluate([batch] * (2 + rank))


def saved_alone(pipeline: Pipeline, rank: int) -> None:
    """One rank alone saves the weights, as is usual under DistributedDataParallel."""
    for number, minibatch in enumerate(minibatches()):
        if (rank, number) == (0, 2):
            pipeline.save_weights("weights.pt")
        pipeline.step(minibatch)


def slow_everywhere(pipeline: Pipeline, rank: int) -> None:
    """All ranks take their time between two steps, which is no hang."""
    first, second, *_ = minibatches()
    pipeline.step(first)
    time.sleep(2 * HANG_TIMEOUT_S)
    pipeline.step(second)
    time.sleep(2 * HANG_TIMEOUT_S)
    pipeline.evaluate([((first[0][0][:4],), first[1][:4])])


def slow_alone(pipeline: Pipeline, rank: int) -> None:
    """One rank takes less than the time-out longer than the other, after a time that all took."""
    first, second, *_ = minibatches()
    pipeline.step(first)
    time.sleep(2 * HANG_TIMEOUT_S + rank * HANG_TIMEOUT_S / 2)
    pipeline.step(second)


def never_back(pipeline: Pipeline, rank: int) -> None:
    """One rank does not come back from its own code."""
    for number, minibatch in enumerate(minibatches()):
        if (rank, number) == (1, 3):
            time.sleep(3600)
        pipeline.step(minibatch)


def left(pipeline: Pipeline, rank: int) -> None:
    """One rank's script ends within the loop."""
    for number, minibatch in enumerate(minibatches()):
        if (rank, number) == (1, 3):
            raise SystemExit(0)
        pipeline.step(minibatch)


def saved_in_turn(pipeline: Pipeline, rank: int) -> None:
    """Checkpoints go to several folders in turn, also when nothing was trained in between."""
    first, second, *_ = minibatches()
    pipeline.step(first)
    pipeline.save_checkpoint("last")
    pipeline.step(second)
    pipeline.save_checkpoint("best")

    before = len(list(Path("/proc/self/fd").iterdir()))
    for folder in ("last", "best", "other", "last"):
        pipeline.save_checkpoint(folder)
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "a lock and a group at a time"


def continued(pipeline: Pipeline, rank: int) -> None:
    """What a run continues from is removed after its first checkpoint, as by save_total_limit."""
    done = pipeline.load_checkpoint("best")
    for minibatch in list(minibatches())[done:]:
        pipeline.step(minibatch)
        pipeline.save_checkpoint(f"after-{pipeline.minibatches}")
        if rank == 0:
            shutil.rmtree("best", ignore_errors=True)


LOOPS: dict[str, Loop] = {
    each.__name__: each
    for each in (
        same,
        shuffled,
        sampled,
        reordered,
        smaller,
        short,
        uneven,
        evaluated_otherwise,
        evaluated_shorter,
        saved_alone,
        saved_in_turn,
        continued,
        slow_everywhere,
        slow_alone,
        never_back,
        left,
    )
}


def run_loop(
    name: str, folder: Path, plan: str, workers: int = 2
) -> tuple[list[dict[str, Any]], str]:
    """Run one of the loops; return what each rank reports, nothing where it was ended, and what all
    wrote.
    """
    log = folder / "workers.log"
    log.touch()
    store = TCPStore(
        _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
    )
    common = {
        WORLD: workers,
        "LOCAL_WORLD_SIZE": workers,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": store.port,
    }
    common |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    variables = os.environ | _ENVIRONMENT | {key: str(value) for key, value in common.items()}
    processes = [
        _warm().Process(
            target=_worker,
            args=(name, folder, plan, variables | {RANK: str(rank), "LOCAL_RANK": str(rank)}),
            daemon=True,
        )
        for rank in range(workers)
    ]
    run_to_end(processes, log, may_fail=True)
    reports = [folder / f"report-{rank}.json" for rank in range(workers)]
    read = [json.loads(path.read_text("utf-8")) if path.exists() else {} for path in reports]
    return read, log.read_text("utf-8")


def _worker(name: str, folder: Path, plan: str, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(1)
    rank = int(variables[RANK])
    report: dict[str, Any] = {}
    log = (folder / "workers.log").open("a", encoding="utf-8", buffering=1)
    with log as file, redirect_stdout(file), redirect_stderr(file):
        try:
            _train(name, folder, plan, rank, report)
        except BaseException as error:
            report["error"] = str(error)
            report["kind"] = type(error).__name__
            traceback.print_exc()
            raise
        finally:
            (folder / f"report-{rank}.json").write_text(json.dumps(report), encoding="utf-8")


def _train(name: str, folder: Path, plan: str, rank: int, report: dict[str, Any]) -> None:
    with planner.pipeline(
        planner.load_plan(folder / plan),
        folder / "model.py",
        evaluates="evaluated" in name or name == "slow_everywhere",
        hang_timeout_s=HANG_TIMEOUT_S,
    ) as pipeline:
        try:
            LOOPS[name](pipeline, rank)
        finally:
            report["updates"] = [
                int(state["step"])
                for optimizer in pipeline.optimizers
                for state in list(optimizer.state.values())[:1]
            ]
    report["losses"] = pipeline.losses
