"""Train a plan of one stage and a plain loop in one process, in turn: `python -m planner.selftest.workers.one_stage`.

Both have the same model, optimizer and batches, and read the loss after each step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported by a star import

from planner.executor.run.pipeline import pipeline
from planner.formats.files import Record, save_record
from planner.formats.plan import Plan
from planner.model.batch import Batch
from planner.model.loss import loss_of
from planner.model.spec import TrainingSpec, load_model_file
from planner.profiler.this_machine import keep_freed_pages
from planner.selftest.lab import SEED, Lab
from planner.selftest.workers.start import run_workers

WARM_UP = 5  # steps of each
BATCHES = 4  # different ones


class Task(Record):
    """What to measure."""

    model: str
    plan: Plan
    device: str
    pairs: int
    steps: int  # of each in a pair


class Pairs(Record):
    """Seconds per step, of each pair; `thread` is the processor time of the thread that trains."""

    plain_s: tuple[float, ...]
    pipeline_s: tuple[float, ...]
    plain_thread_s: tuple[float, ...]
    pipeline_thread_s: tuple[float, ...]


@dataclass
class Contender:
    """One way to train, and its seconds per step so far."""

    step: Callable[[Batch], object]
    wall_s: list[float] = field(default_factory=list)
    thread_s: list[float] = field(default_factory=list)

    def measure(self, batches: Sequence[Batch]) -> None:
        """Train on these, and keep the mean seconds of a step."""
        start_s, thread_s = time.perf_counter(), time.thread_time()
        for batch in batches:
            self.step(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # or its work would count as the other contender's
        self.wall_s.append((time.perf_counter() - start_s) / len(batches))
        self.thread_s.append((time.thread_time() - thread_s) / len(batches))


def measure_pairs(lab: Lab, model: str, plan: Plan, *, pairs: int, steps: int) -> Pairs:
    """Measure in a process of its own."""
    task = Task(model=model, plan=plan, device=lab.device.type, pairs=pairs, steps=steps)
    (text,) = run_workers(__name__, lab.folder, task.model_dump_json(), workers=1)
    return Pairs.model_validate_json(text)


def _plain_loop(spec: TrainingSpec, device: torch.device) -> Callable[[Batch], object]:
    """Return a step of a plain loop."""
    model = spec.build_model().to(device)
    optimizer = spec.optimizer(dict(model.named_parameters()))

    def step(batch: Batch) -> float:
        batch = batch.to(device)
        optimizer.zero_grad()
        loss = loss_of(model(*batch.args, **batch.kwargs), batch.target, spec.loss)
        torch.autograd.backward(loss)
        optimizer.step()
        return float(loss)

    return step


def measure(task: Task) -> Pairs:
    """Measure in this process, whose environment is that of a single worker."""
    keep_freed_pages()
    torch.set_num_threads(task.plan.device.threads or 1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    spec = load_model_file(task.model)
    torch.manual_seed(SEED)
    plain_step = _plain_loop(spec, torch.device(task.device))
    assert task.plan.microbatch_size is not None
    batches = [spec.example_batch(task.plan.microbatch_size * task.plan.microbatches) for _ in range(BATCHES)]
    plain = Contender(plain_step)
    with pipeline(task.plan, task.model, seed=SEED) as one_stage:
        ours = Contender(lambda batch: one_stage.step((batch.args, batch.kwargs, batch.target)))
        for contender in [plain, ours] * WARM_UP:
            contender.step(batches[0])
        for number in range(task.pairs):
            first, second = (plain, ours) if number % 2 else (ours, plain)
            for contender in (first, second):
                contender.measure([batches[index % BATCHES] for index in range(task.steps)])
    return Pairs(
        plain_s=tuple(plain.wall_s),
        pipeline_s=tuple(ours.wall_s),
        plain_thread_s=tuple(plain.thread_s),
        pipeline_thread_s=tuple(ours.thread_s),
    )


if __name__ == "__main__":
    save_record(measure(Task.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))), sys.argv[2])
