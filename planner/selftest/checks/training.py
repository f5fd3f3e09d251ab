"""Do runs over several workers compute what one process does?

Losses of each minibatch are compared with those of the unsplit model in plain PyTorch, in this process. Asynchronous
schedules use older weights by design, so the reference takes each gradient at the versions that the schedule's
instructions name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from planner.formats.plan import Plan
from planner.options.training import CheckpointOptions, RunOptions, TrainingOptions
from planner.schedule.flush import FLUSH
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Schedule
from planner.selftest.lab import SEED, Lab, even_plan, location, spec_of
from planner.selftest.reference import Reference
from planner.selftest.rows import Case, Check, Outcome, judged, skipped
from planner.workers.job import TrainResult

STEPS = 20
BATCH_SIZE = 4  # samples of a microbatch
# Sums are made in another order than in one process; a GPU also chooses its kernels anew in every process. An update at
# another version of the weights shows as 3e-4 or more.
LIMIT_CPU, LIMIT_CUDA = 1e-5, 1e-4
CONVOLUTIONAL, DROPOUT = location("convolutional"), location("convolutional", "build_dropout")
TIED = location("transformer", "build_small")


def _cases(lab: Lab) -> Iterator[Case]:
    for schedule in SCHEDULES:
        yield Case(f"{schedule}", partial(_schedule, lab, schedule))
    yield Case("replicas", partial(_equals_reference, lab, CONVOLUTIONAL, FLUSH, replicas=(lab.workers,)))
    yield Case("tied weights", partial(_equals_reference, lab, TIED, FLUSH))
    yield Case("recomputation", partial(_equals_reference, lab, CONVOLUTIONAL, FLUSH, recompute=True))
    yield Case("dropout", partial(_dropout, lab))
    yield Case("resume", partial(_resume, lab))
    yield Case("evaluation", partial(_evaluation, lab))
    yield Case("trace", partial(_trace, lab))


def _schedule(lab: Lab, schedule: Schedule) -> Outcome:
    return _equals_reference(lab, CONVOLUTIONAL, schedule)


def _equals_reference(
    lab: Lab, model: str, schedule: Schedule, *, replicas: Sequence[int] = (), recompute: bool = False
) -> Outcome:
    """Train a straight pipeline, or one of given replicas, and compare its losses with the reference's."""
    profile = lab.profile(model, BATCH_SIZE)
    replicas = replicas or (1,) * lab.workers
    if len(profile.layers) < len(replicas) * 2:
        return skipped(f"the model has {len(profile.layers)} layers only, too few for {lab.workers} workers")
    plan = even_plan(profile, schedule, replicas, recompute=recompute)
    losses = losses_of(lab.train(model, plan, STEPS))
    return compared(lab, losses, _expected(lab, model, plan), _kind(plan))


def _expected(lab: Lab, model: str, plan: Plan) -> list[float]:
    return Reference(spec_of(model), lab.profile(model, BATCH_SIZE), plan, SEED, lab.device).train(STEPS)


def _kind(plan: Plan) -> str:
    return "delayed updates in one process" if plan.schedule.asynchronous else "one process"


def losses_of(result: TrainResult) -> list[float]:
    """Return the losses of a run by minibatch, NaN where one was not finite."""
    return [math.nan if entry.loss is None else entry.loss for entry in result.losses]


def compared(lab: Lab, found: Sequence[float], expected: Sequence[float], what: str) -> Outcome:
    """Judge losses by their largest relative difference from what was expected."""
    limit = LIMIT_CUDA if lab.cuda else LIMIT_CPU
    if len(found) != len(expected):
        return judged(False, f"{len(found)} losses were told, and {what} has {len(expected)}")
    differences = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
    worst = max((math.inf if math.isnan(each) else each) for each in differences)
    close = "equal to the bit" if worst == 0 else f"within {worst:.0e} (limit {limit:.0e})"
    if worst <= limit:
        return judged(True, f"{len(found)} losses are those of {what}, {close}", worst, limit)
    first = next(n for n, each in enumerate(differences) if math.isnan(each) or each > limit)
    text = f"the loss of minibatch {first} is {found[first]:.6g}, and {expected[first]:.6g} in {what}"
    return judged(False, text, worst, limit)


def _dropout(lab: Lab) -> Outcome:
    """Random numbers do not depend on the split: one stage and several have the same losses."""
    profile = lab.profile(DROPOUT, BATCH_SIZE)
    several = even_plan(profile, FLUSH, (1,) * lab.workers)
    one = even_plan(profile, FLUSH, (1,)).model_copy(update={"microbatches": several.microbatches})
    found, expected = (losses_of(lab.train(DROPOUT, plan, STEPS)) for plan in (several, one))
    return compared(lab, found, expected, "one stage with the same dropout")


def _resume(lab: Lab) -> Outcome:
    """Stop at a checkpoint in the middle, continue from it, and compare with a run that did not stop."""
    plan = even_plan(lab.profile(CONVOLUTIONAL, BATCH_SIZE), FLUSH, (1,) * lab.workers)
    folder = str(lab.folder / "checkpoints")
    first = lab.train(CONVOLUTIONAL, plan, STEPS // 2, checkpoints=CheckpointOptions(every=STEPS // 2, folder=folder))
    resumed = CheckpointOptions(folder=folder, resume="auto")
    second = lab.train(CONVOLUTIONAL, plan, STEPS, checkpoints=resumed)
    if second.first_minibatch != STEPS // 2:
        return judged(False, f"it continued at minibatch {second.first_minibatch}, not {STEPS // 2}")
    losses = losses_of(first) + losses_of(second)
    return compared(lab, losses, _expected(lab, CONVOLUTIONAL, plan), "one process that did not stop")


def _evaluation(lab: Lab) -> Outcome:
    """Evaluate twice in a run, and compare with the unsplit model at the same weights."""
    profile, every = lab.profile(CONVOLUTIONAL, BATCH_SIZE), STEPS // 2
    plan = even_plan(profile, FLUSH, (1,) * lab.workers)
    result = lab.train(CONVOLUTIONAL, plan, STEPS, options=TrainingOptions(evaluate_every=every))
    reference = Reference(spec_of(CONVOLUTIONAL), profile, plan, SEED, lab.device)
    expected: list[float] = []

    def after(minibatch: int) -> None:
        if minibatch % every == 0:
            expected.append(reference.evaluate())

    reference.train(STEPS, after)
    found = [math.nan if each.loss is None else each.loss for each in result.evaluations]
    return compared(lab, found, expected, "the evaluations in one process")


def _trace(lab: Lab) -> Outcome:
    """Record what the workers do, which disturbs nothing."""
    plan = even_plan(lab.profile(CONVOLUTIONAL, BATCH_SIZE), FLUSH, (1,) * lab.workers)
    path = lab.folder / "trace.json"
    result = lab.train(CONVOLUTIONAL, plan, STEPS, run_options=RunOptions(trace=str(path)))
    outcome = compared(lab, losses_of(result), _expected(lab, CONVOLUTIONAL, plan), "one process")
    if outcome.result == "passed" and not (path.exists() and path.stat().st_size):
        return judged(False, "no trace was written")
    return outcome


CHECK = Check("training", "do workers train as one process does?", _cases)
