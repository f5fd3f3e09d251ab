"""The training data of one worker: the model file's, or what a loop hands in, as its plan divides
it.

dataset -> checks of items -> shares of the loss -> read ahead -> of this rank -> of varying lengths
-> compared
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from planner.errors import PlanError
from planner.executor.run.comparison import READ_HINT, BatchComparison, Fact
from planner.executor.run.data import (
    BatchSource,
    DatasetBatches,
    FedBatches,
    LengthDrift,
    OfRank,
    VaryingBatches,
    make_batches,
    weighted,
)
from planner.executor.run.reading_ahead import ReadAhead
from planner.executor.run.sample_checks import CheckedSamples
from planner.executor.run.stages import Modules
from planner.formats.plan import Plan
from planner.model.batch_digest import digest_of
from planner.model.spec import TrainingSpec
from planner.plan.rank_groups import sample_parts
from planner.workers.job import Job

if TYPE_CHECKING:
    from planner.model.tensor.group import TensorGroup


def batches_of_file(job: Job, spec: TrainingSpec, device: torch.device) -> BatchSource:
    """Divide the model file's data as the plan does, over all ranks of a group that divide
    samples.
    """
    plan = job.plan
    assert plan.microbatch_size is not None  # or building the modules had failed
    ranks = sample_parts(plan)
    return make_batches(
        spec,
        plan.microbatch_size // ranks,
        ranks * plan.microbatches,
        job.seed,
        drop_last=job.options.drop_last,
        device=device,
    )


def read_by_worker(
    read: Callable[[], BatchSource],
    built: Modules,
    spec: TrainingSpec,
    comparison: BatchComparison,
    device: torch.device,
) -> BatchSource:
    """Return what this worker reads of the model file's data, which `read` returns."""
    source = read()
    if isinstance(source, DatasetBatches):
        source = CheckedSamples(source, comparison)
    whole = any(module.has_loss for module in built.training.values())
    return ReadAhead(weighted(source, built.loss, spec, whole=whole), device)


def data_facts(
    read: Callable[[], BatchSource] | None, built: Modules, spec: TrainingSpec
) -> Iterable[Fact]:
    """Yield what all workers must find alike of the data before any is read; `read` is None for an
    own loop.
    """
    source = None if read is None else read()
    if isinstance(source, DatasetBatches):
        yield Fact("the number of samples of dataset()", source.samples, READ_HINT)
    if built.lengths:
        yield Fact("lengths()", digest_of([repr(spec.lengths())]))


def divided_data(
    data: BatchSource,
    plan: Plan,
    built: Modules,
    spec: TrainingSpec,
    rank: int,
    tensor: "TensorGroup | None",
) -> BatchSource:
    """Return what this rank has of each microbatch, with its lengths where they vary.

    Raises:
        PlanError: where ranks divide samples whose lengths vary.
    """
    if isinstance(data, FedBatches):
        data.check_sizes_by(built.other_sizes)

    if tensor is not None and plan.by_samples:
        if built.lengths:
            raise PlanError(
                "the executor does not shard experts over ranks where the lengths of batches vary",
                hint="pad all batches alike and leave lengths() out, or solve with `tensor=1`",
            )
        data = OfRank(data, tensor.place, sample_parts(plan))

    if built.lengths:
        drift = None
        if plan.lengths is not None and rank == 0:
            drift = LengthDrift(plan.lengths, plan.microbatches, spec)
        data = VaryingBatches(data, built.lengths, drift)

    return data
