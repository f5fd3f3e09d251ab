"""Do runs over several workers compute what one process does, in the memory that was predicted, and
fail as told?

Losses are compared with those of a plain loop over the unsplit model in this process. Under a
schedule whose gradients are stale, the loop computes them at the weights that PipeDream's formula
names. Nothing of the executor takes part but the order of the data.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from planner.errors import PlannerError
from planner.executor.run.data import BatchSource, make_batches
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.loss import loss_of
from planner.model.modes import put_in_training
from planner.model.spec import TrainingSpec, load_model_file
from planner.plan.shape import shape_of
from planner.profiler.this_machine import large_blocks_apart, thread_count
from planner.schedule.instructions import Unit
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Schedule
from planner.selfcheck.lab import SEED, Case, Lab, Outcome, even_plan, judged, location
from planner.selfcheck.models import KILLED
from planner.units import format_bytes
from planner.workers.job import WorkerReport
from planner.workers.launch import environment

STEPS = 20
# Sums are made in another order than in one process. An update at another version of the weights
# shows as 3e-4 or more.
LIMIT_CPU = 1e-5
LIMIT_GPU = 1e-4
# of attention, which multiplies differences in rounding by a hundred every four steps
FEW_STEPS = 5
MEMORY_STEPS = 8
# so that libraries' own memory on a GPU counts little
MEMORY_BATCH_SIZE_CPU = 64
MEMORY_BATCH_SIZE_GPU = 512
# A CPU has resident pages, of which libraries have a few percent more or less than a plan knows.
# On a GPU the allocator counts to the byte, and a prediction must not be below it by more than
# small values take.
LEAST_CPU = -0.05
LEAST_GPU = -0.01
MOST = 0.10
TOLD_S = 10.0  # from a worker's end to the message
CONVOLUTIONAL = location("build_convolutional")
TRANSFORMER = location("build_transformer")

Weights = Mapping[str, Tensor]


def training_cases(lab: Lab) -> Iterator[Case]:
    """Yield a case for each schedule, for replicas, and for weights that two stages share."""
    straight = (1,) * lab.workers
    for schedule in SCHEDULES:
        yield f"{schedule}", partial(_equals_one_process, lab, CONVOLUTIONAL, schedule, straight)
    yield "replicas", partial(_equals_one_process, lab, CONVOLUTIONAL, FLUSH, (lab.workers,))
    yield "tied weights", partial(_equals_one_process, lab, TRANSFORMER, FLUSH, straight, FEW_STEPS)


def _equals_one_process(
    lab: Lab, model: str, schedule: Schedule, replicas: Sequence[int], steps: int = STEPS
) -> Outcome:
    profile = lab.profile(model)
    if len(profile.layers) < len(replicas) * 2:
        few = f"{len(profile.layers)} layers are too few for {lab.workers} workers"
        return Outcome("skipped", few)

    plan = even_plan(profile, schedule, replicas)
    entries = lab.train(model, plan, steps).losses
    found = [math.nan if entry.loss is None else entry.loss for entry in entries]

    expected, _ = train_alone(load_model_file(model), profile, plan, SEED, lab.device, steps)

    reference = "one process"
    if schedule.asynchronous:
        reference = "delayed updates in one process"
    limit = LIMIT_GPU if lab.on_gpu else LIMIT_CPU
    return compared(found, expected, reference, limit)


def compared(
    found: Sequence[float], expected: Sequence[float], reference: str, limit: float
) -> Outcome:
    """Judge the losses of a run by the largest relative difference from those of the reference."""
    if len(found) != len(expected):
        few = f"{len(found)} losses were reported, and {reference} has {len(expected)}"
        return judged(False, few)

    differences = [
        _relative_difference(one, other) for one, other in zip(found, expected, strict=True)
    ]
    worst = max(differences)
    if worst > limit:
        first = next(number for number, each in enumerate(differences) if each > limit)
        told = f"the loss of minibatch {first} is {found[first]:.6g}"
        return judged(False, f"{told}, and {expected[first]:.6g} in {reference}", worst, limit)

    close = "equal to the bit"
    if worst != 0:
        close = f"within {worst:.0e} (limit {limit:.0e})"
    return judged(True, f"{len(found)} losses are those of {reference}, {close}", worst, limit)


def _relative_difference(one: float, other: float) -> float:
    """Return how far a loss is from the expected one; infinity for one that is no number."""
    difference = abs(one - other) / abs(other)
    if math.isnan(difference):
        return math.inf
    return difference


def train_alone(
    spec: TrainingSpec,
    profile: Profile,
    plan: Plan,
    seed: int,
    device: torch.device,
    minibatches: int,
) -> tuple[list[float], nn.Module]:
    """Train the unsplit model in this process as a plan without dropout says.

    The gradients of a weight that is d updates stale are taken at w(t - d), and applied to w(t)
    (Narayanan et al. 2019, section 3.3). Asynchronous stages have one replica here.

    Returns:
        The mean loss of each minibatch, and the trained model.
    """
    assert plan.microbatch_size is not None
    torch.manual_seed(seed)
    model = spec.build_model().to(device)
    put_in_training(model)
    weights = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = spec.optimizer(weights)
    delays = _staleness(profile, plan, model)
    data = make_batches(spec, plan.microbatch_size, plan.microbatches, seed)

    losses: list[float] = []
    versions: list[Weights] = []
    with thread_count(1):  # as the workers: how a sum is divided over threads changes its rounding
        for minibatch in range(minibatches):
            versions.append({name: each.detach().clone() for name, each in weights.items()})
            for name, weight in weights.items():
                weight.data.copy_(versions[max(0, minibatch - delays.get(name, 0))][name])
            losses.append(_accumulate_gradients(spec, model, data, minibatch))

            for name, weight in weights.items():
                weight.data.copy_(versions[-1][name])
            optimizer.step()
            optimizer.zero_grad()

    return losses, model


def _accumulate_gradients(
    spec: TrainingSpec, model: nn.Module, data: BatchSource, minibatch: int
) -> float:
    """Run a minibatch forward and backward; return its mean loss."""
    device = next(model.parameters()).device
    total = 0.0
    for microbatch in range(data.microbatches):
        batch = data.batch(Unit(minibatch, microbatch)).to(device)
        loss = loss_of(model(*batch.args, **batch.kwargs), batch.target, spec.loss)
        torch.autograd.backward(loss / data.microbatches)
        total += float(loss.detach())
    return total / data.microbatches


def _staleness(profile: Profile, plan: Plan, model: nn.Module) -> dict[str, int]:
    """Return by how many updates each weight's gradients are stale; a tied one belongs to the first
    stage that uses it.
    """
    shape = shape_of(plan)
    parameters = {layer.name: layer.parameters for layer in profile.layers}
    late: dict[nn.Parameter, int] = {}
    for number, stage in enumerate(plan.stages):
        for layer in stage.layers:
            for name in parameters[layer]:
                late.setdefault(model.get_parameter(name), shape.late(number))
    return {name: late[weight] for name, weight in model.named_parameters() if weight in late}


def memory_cases(lab: Lab) -> Iterator[Case]:
    """Yield a case for a synchronous schedule, and one that stashes weights."""
    for schedule in (FLUSH, ONE_F_ONE_B):
        yield f"{schedule}", partial(_memory_is_as_predicted, lab, schedule)


def _memory_is_as_predicted(lab: Lab, schedule: Schedule) -> Outcome:
    batch_size = MEMORY_BATCH_SIZE_CPU
    if lab.on_gpu:
        batch_size = MEMORY_BATCH_SIZE_GPU
    # glibc keeps what is freed. A worker that gives blocks back has the size of what it uses.
    with large_blocks_apart():
        profile = lab.profile(TRANSFORMER, batch_size)
    plan = even_plan(profile, schedule, (1,) * lab.workers)
    with environment({"MALLOC_MMAP_THRESHOLD_": "65536"}):
        reports = lab.train(TRANSFORMER, plan, MEMORY_STEPS).reports
    return memory_outcome(reports, LEAST_GPU if lab.on_gpu else LEAST_CPU)


def memory_outcome(reports: Sequence[WorkerReport], least: float) -> Outcome:
    """Judge predictions by the relative error, from `least` to `MOST`, that is worst."""
    errors = [report.predicted_memory_bytes / report.peak_memory_bytes - 1 for report in reports]
    worst = min(errors) if min(errors) < least else max(errors)

    found = []
    for report, error in zip(reports, errors, strict=True):
        predicted = format_bytes(report.predicted_memory_bytes)
        measured = format_bytes(report.peak_memory_bytes)
        found.append(
            f"worker {report.rank}: {predicted} predicted, {measured} measured ({error:+.1%})"
        )

    told = f"{', '.join(found)}; limits {least:+.0%} and {MOST:+.0%}"
    return judged(least <= worst <= MOST, told, worst, MOST)


def failure_cases(lab: Lab) -> Iterator[Case]:
    """Yield the case of a worker that is killed."""
    yield "killed", partial(_killed, lab)


def _killed(lab: Lab) -> Outcome:
    plan = even_plan(lab.profile(CONVOLUTIONAL), ONE_F_ONE_B, (1,) * lab.workers)
    mark = lab.folder / "killed"
    try:
        with environment({KILLED: str(mark)}):
            lab.train(CONVOLUTIONAL, plan, 500 * STEPS)
    except PlannerError as error:
        if mark.exists():
            killed_at = float(mark.read_text(encoding="utf-8"))
        else:
            killed_at = -math.inf
        seconds = time.time() - killed_at
        named = "worker 0 (stage 0)" in error.message and "SIGKILL" in error.message
        told = f"reported after {seconds:.1f} s (limit {TOLD_S:g} s): {error.message}"
        return judged(named and seconds <= TOLD_S, told, seconds, TOLD_S)

    return judged(False, "the run ended as if nothing had happened")
