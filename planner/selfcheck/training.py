"""Do runs over several workers compute what one process does, in the memory that was predicted, and fail as told?

Losses are compared with those of the unsplit model, trained in this process in plain PyTorch at the weight versions
that the schedule's instructions name. Under a schedule that drains, this is ordinary training with the mean gradient of
a minibatch's microbatches. Under an asynchronous one, the gradient of a unit is taken at the weights that each stage
had when the unit's forward ran there, w(t+1) = w(t) - lr * grad f(w1(t-n+1), ..., wn(t)) for 1F1B with weight stashing
(PipeDream, SOSP 2019, section 3.3). Nothing of the executor takes part but the order of the data.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from planner.errors import PlannerError
from planner.executor.run.data import make_batches
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.loss import loss_of
from planner.model.spec import TrainingSpec, load_model_file
from planner.plan.shape import shape_of
from planner.profiler.this_machine import thread_count
from planner.schedule.instructions import Backward, BackwardWeight, Forward, Unit, Update
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import PipelineShape, Schedule, stream
from planner.selfcheck.lab import SEED, Case, Lab, Outcome, even_plan, judged, location
from planner.selfcheck.models import KILLED
from planner.units import format_bytes
from planner.workers.job import WorkerReport
from planner.workers.launch import environment

STEPS = 20
# Sums are made in another order than in one process; a GPU also chooses its kernels anew in every process. An update at
# another version of the weights shows as 3e-4 or more.
LIMIT_CPU, LIMIT_GPU = 1e-5, 1e-4
MEMORY_STEPS, MEMORY_BATCH_SIZE = 8, 64
# A CPU's worker is measured by its resident pages, of which libraries and the allocator have a few percent more or less
# than a plan knows. On a GPU the allocator counts to the byte, and a prediction must not be below it.
LEAST_CPU, LEAST_GPU, MOST = -0.05, 0.0, 0.10
# glibc keeps what is freed, and what it keeps in fragments does not depend on the plan. A worker that gives blocks back
# has the size of what it uses.
PAGES_RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
TOLD_S = 10.0  # from a worker's end to the message
CONVOLUTIONAL, TRANSFORMER = location("build_convolutional"), location("build_transformer")


def training_cases(lab: Lab) -> Iterator[Case]:
    """Yield a straight pipeline under every schedule, replicas of one stage, and stages that share weights."""
    straight = (1,) * lab.workers
    for schedule in SCHEDULES:
        yield f"{schedule}", partial(_equals_one_process, lab, CONVOLUTIONAL, schedule, straight)
    yield "replicas", partial(_equals_one_process, lab, CONVOLUTIONAL, FLUSH, (lab.workers,))
    yield "tied weights", partial(_equals_one_process, lab, TRANSFORMER, FLUSH, straight)


def _equals_one_process(lab: Lab, model: str, schedule: Schedule, replicas: Sequence[int]) -> Outcome:
    profile = lab.profile(model)
    if len(profile.layers) < len(replicas) * 2:
        return Outcome("skipped", f"the model has {len(profile.layers)} layers, too few for {lab.workers} workers")
    plan = even_plan(profile, schedule, replicas)
    found = [math.nan if entry.loss is None else entry.loss for entry in lab.train(model, plan, STEPS).losses]
    expected, _ = train_alone(load_model_file(model), profile, plan, SEED, lab.device, STEPS)
    what = "delayed updates in one process" if schedule.asynchronous else "one process"
    return compared(found, expected, what, LIMIT_GPU if lab.on_gpu else LIMIT_CPU)


def compared(found: Sequence[float], expected: Sequence[float], what: str, limit: float) -> Outcome:
    """Judge losses by their largest relative difference from what was expected."""
    if len(found) != len(expected):
        return judged(False, f"{len(found)} losses were told, and {what} has {len(expected)}")
    differences = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
    worst = max(math.inf if math.isnan(each) else each for each in differences)
    if worst <= limit:
        close = "equal to the bit" if worst == 0 else f"within {worst:.0e} (limit {limit:.0e})"
        return judged(True, f"{len(found)} losses are those of {what}, {close}", worst, limit)
    first = next(number for number, each in enumerate(differences) if not each <= limit)
    text = f"the loss of minibatch {first} is {found[first]:.6g}, and {expected[first]:.6g} in {what}"
    return judged(False, text, worst, limit)


def train_alone(
    spec: TrainingSpec, profile: Profile, plan: Plan, seed: int, device: torch.device, minibatches: int
) -> tuple[list[float], nn.Module]:
    """Train the unsplit model in this process as a plan says; return the loss of each minibatch, and the model.

    Args:
        spec: of a model without dropout; its random numbers would be others than the workers'.
        plan: made from that profile; if stages share weights, its schedule must drain.
    """
    assert plan.microbatch_size is not None
    torch.manual_seed(seed)
    model = spec.build_model().to(device)
    data = make_batches(spec, plan.microbatch_size, plan.microbatches, seed)
    shape, losses = shape_of(plan), []
    with thread_count(1):  # as the workers: how a sum is divided over threads changes its rounding
        stages = [
            _Stage(parameters, spec, shape, number, minibatches)
            for number, parameters in enumerate(_owned(profile, plan, model))
        ]
        for minibatch in range(minibatches):
            units = [Unit(minibatch, microbatch) for microbatch in range(plan.microbatches)]
            total = 0.0
            for unit in units:
                for stage in stages:
                    stage.load(stage.used[unit])
                batch = data.batch(unit).to(device)
                loss = loss_of(model(*batch.args, **batch.kwargs), batch.target, spec.loss)
                torch.autograd.backward(loss)
                for stage in stages:
                    stage.take(unit)
                total += float(loss.detach())
            losses.append(total / len(units))
    for stage in stages:
        stage.load(-1)
    return losses, model


class _Stage:
    """The parameters of one stage, and their values after each update.

    Versions count updates.

    Attributes:
        used: per unit, the version that its forward uses.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        spec: TrainingSpec,
        shape: PipelineShape,
        stage: int,
        minibatches: int,
    ) -> None:
        self._parameters = list(parameters.values())
        self.used: dict[Unit, int] = {}
        self._rounds: dict[Unit, int] = {}  # per unit, the update that its gradient goes into
        for rank in shape.ranks[stage]:  # replicas of a stage have different units
            updates = 0
            for instruction in stream(shape, stage, rank, minibatches):
                match instruction:
                    case _ if instruction.stage != stage:
                        continue
                    case Forward(unit=unit, version=version):
                        self.used[unit] = updates if version is None else version
                    case Backward(unit=unit) | BackwardWeight(unit=unit):
                        self._rounds[unit] = updates
                    case Update():
                        updates += 1
        self._left = Counter(self._rounds.values())  # units of each update that have not run
        self._optimizer = spec.optimizer(parameters) if parameters else None
        self._versions = [[parameter.detach().clone() for parameter in self._parameters]]
        self._gradients: defaultdict[int, list[list[Tensor | None]]] = defaultdict(list)

    def load(self, version: int) -> None:
        """Give the parameters the values that they had after so many updates."""
        for parameter, value in zip(self._parameters, self._versions[version], strict=True):
            parameter.data.copy_(value)
            parameter.grad = None

    def take(self, unit: Unit) -> None:
        """Keep a unit's gradients; update the newest weights with their mean when they are the round's last."""
        number = self._rounds[unit]
        self._gradients[number].append([parameter.grad for parameter in self._parameters])
        self._left[number] -= 1
        if self._left[number]:
            return
        self.load(-1)
        for parameter, *several in zip(self._parameters, *self._gradients.pop(number), strict=True):
            there = [gradient for gradient in several if gradient is not None]
            parameter.grad = torch.stack(there).mean(0) if there else None
        if self._optimizer is not None:
            self._optimizer.step()
        self._versions.append([parameter.detach().clone() for parameter in self._parameters])


def _owned(profile: Profile, plan: Plan, model: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Return the trained parameters of each stage; a tied one has one name, in the first stage that uses it."""
    layers = {layer.name: layer.parameters for layer in profile.layers}
    left = {id(each): name for name, each in model.named_parameters() if each.requires_grad}
    owned: list[dict[str, nn.Parameter]] = []
    for stage in plan.stages:
        own = (model.get_parameter(name) for layer in stage.layers for name in layers[layer])
        owned.append({left.pop(id(parameter)): parameter for parameter in own if id(parameter) in left})
    return owned


def memory_cases(lab: Lab) -> Iterator[Case]:
    """Yield a synchronous schedule and one that stashes weights."""
    for schedule in (FLUSH, ONE_F_ONE_B):
        yield f"{schedule}", partial(_memory, lab, schedule)


def _memory(lab: Lab, schedule: Schedule) -> Outcome:
    model = location("build_wide")
    plan = even_plan(lab.profile(model, MEMORY_BATCH_SIZE), schedule, (1,) * lab.workers)
    with environment(PAGES_RETURNED):
        reports = lab.train(model, plan, MEMORY_STEPS).reports
    return memory_outcome(reports, LEAST_GPU if lab.on_gpu else LEAST_CPU)


def memory_outcome(reports: Sequence[WorkerReport], least: float) -> Outcome:
    """Judge the worker that is furthest from its prediction."""
    errors = [report.predicted_memory_bytes / report.peak_memory_bytes - 1 for report in reports]
    said = []
    for report, error in zip(reports, errors, strict=True):
        predicted, measured = format_bytes(report.predicted_memory_bytes), format_bytes(report.peak_memory_bytes)
        said.append(f"worker {report.rank}: {predicted} predicted, {measured} measured ({error:+.1%})")
        on_gpu = {"reserved": report.reserved_memory_bytes, "used": report.used_memory_bytes}
        said += [f"{format_bytes(count)} {name}" for name, count in on_gpu.items() if count is not None]
    worst = min(errors) if min(errors) < least else max(errors)
    return judged(least <= worst <= MOST, f"{', '.join(said)}; limits {least:+.0%} and {MOST:+.0%}", worst, MOST)


def failure_cases(lab: Lab) -> Iterator[Case]:
    """Yield a worker that is killed in the middle of a run."""
    yield "killed", partial(_killed, lab)


def _killed(lab: Lab) -> Outcome:
    plan, mark = even_plan(lab.profile(CONVOLUTIONAL), ONE_F_ONE_B, (1,) * lab.workers), lab.folder / "killed"
    with environment({KILLED: str(mark)}):
        try:
            lab.train(CONVOLUTIONAL, plan, 500 * STEPS)
        except PlannerError as error:
            seconds = time.time() - float(mark.read_text(encoding="utf-8")) if mark.exists() else math.inf
            told = seconds <= TOLD_S and all(words in error.message for words in ("worker 0 (stage 0)", "SIGKILL"))
            first = error.message.splitlines()[0]
            return judged(told, f"told after {seconds:.1f} s (limit {TOLD_S:g} s): {first}", seconds, TOLD_S)
    return judged(False, "the run ended as if nothing had happened")
