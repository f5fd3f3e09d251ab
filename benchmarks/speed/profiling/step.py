"""Run plain training steps, for their peak memory: python -m benchmarks.speed.profiling.step MODEL
BATCH [--keep].
"""

from __future__ import annotations

import sys

import torch

from planner.model.loss import loss_of
from planner.model.spec import load_model_file
from planner.profiler.this_machine import keep_freed_pages

STEPS = 4


def main() -> None:
    """Train; of the planner, only the loader of model files is used."""
    path, batch_size, *keep = sys.argv[1:]
    if keep:
        keep_freed_pages()
    torch.set_num_threads(1)
    file = load_model_file(path)
    model, batch = file.build_model(), file.example_batch(int(batch_size))
    optimizer = file.optimizer(dict(model.named_parameters()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = model(*batch.args, **batch.kwargs)
        loss_of(output, batch.target, file.loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


if __name__ == "__main__":
    main()
