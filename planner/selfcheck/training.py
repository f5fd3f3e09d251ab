"""Do runs over several workers compute what one process does, in the memory that was predicted, and
fail as told?

Losses are compared with those of the unsplit model, trained in this process in plain PyTorch at the
weight versions that the schedule's instructions name. Nothing of the executor takes part but the
order of the data.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from planner.errors import PlannerError
from planner.executor.run.data import make_batches
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.loss import loss_of
from planner.model.modes import put_in_training
from planner.model.spec import TrainingSpec, load_model_file
from planner.plan.shape import shape_of
from planner.profiler.this_machine import large_blocks_apart, thread_count
from planner.schedule.instructions import Backward, BackwardWeight, Forward, Unit, Update
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Schedule, stream
from planner.selfcheck.lab import SEED, Case, Lab, Outcome, even_plan, judged, location
from planner.selfcheck.models import KILLED
from planner.units import format_bytes
from planner.workers.job import WorkerReport
from planner.workers.launch import environment

STEPS = 20
# Sums are made in another order than in one process. An update at another version of the weights
# shows as 3e-4 or more.
LIMIT_CPU, LIMIT_GPU = 1e-5, 1e-4
# of attention, which multiplies differences in rounding by a hundred every four steps
FEW_STEPS = 5
MEMORY_STEPS = 8
# so that libraries' own memory on a GPU counts little
MEMORY_BATCH_SIZE_CPU, MEMORY_BATCH_SIZE_GPU = 64, 512
# A CPU has resident pages, of which libraries have a few percent more or less than a plan knows.
# On a GPU the allocator counts to the byte, and a prediction must not be below it by more than
# small values take.
LEAST_CPU, LEAST_GPU, MOST = -0.05, -0.01, 0.10
TOLD_S = 10.0  # from a worker's end to the message
CONVOLUTIONAL, TRANSFORMER = location("build_convolutional"), location("build_transformer")


def training_cases(lab: Lab) -> Iterator[Case]:
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
        return Outcome(
            "skipped", f"{len(profile.layers)} layers are too few for {lab.workers} workers"
        )
    plan = even_plan(profile, schedule, replicas)
    found = [
        math.nan if entry.loss is None else entry.loss
        for entry in lab.train(model, plan, steps).losses
    ]
    expected, _ = train_alone(load_model_file(model), profile, plan, SEED, lab.device, steps)
    what = "delayed updates in one process" if schedule.asynchronous else "one process"
    return compared(found, expected, what, LIMIT_GPU if lab.on_gpu else LIMIT_CPU)


def compared(found: Sequence[float], expected: Sequence[float], what: str, limit: float) -> Outcome:
    if len(found) != len(expected):
        return judged(False, f"{len(found)} losses were told, and {what} has {len(expected)}")
    differences = [
        abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)
    ]
    worst = max(math.inf if math.isnan(each) else each for each in differences)
    close = "equal to the bit" if worst == 0 else f"within {worst:.0e} (limit {limit:.0e})"
    text = f"{len(found)} losses are those of {what}, {close}"
    if not worst <= limit:
        first = next(number for number, each in enumerate(differences) if not each <= limit)
        text = (
            f"the loss of minibatch {first} is {found[first]:.6g}, and {expected[first]:.6g} "
            f"in {what}"
        )
    return judged(worst <= limit, text, worst, limit)


def train_alone(
    spec: TrainingSpec,
    profile: Profile,
    plan: Plan,
    seed: int,
    device: torch.device,
    minibatches: int,
) -> tuple[list[float], nn.Module]:
    """Train the unsplit model, without dropout, in this process as a plan says; return the losses,
    and the model.
    """
    assert plan.microbatch_size is not None
    torch.manual_seed(seed)
    model = spec.build_model().to(device)
    put_in_training(model)
    data = make_batches(spec, plan.microbatch_size, plan.microbatches, seed)
    with thread_count(1):  # as the workers: how a sum is divided over threads changes its rounding
        stages, losses = _stages(spec, profile, plan, model, minibatches), []
        for minibatch in range(minibatches):
            total = 0.0
            for unit in (Unit(minibatch, microbatch) for microbatch in range(plan.microbatches)):
                for stage in stages:
                    stage.load(stage.used[unit])
                batch = data.batch(unit).to(device)
                loss = loss_of(model(*batch.args, **batch.kwargs), batch.target, spec.loss)
                torch.autograd.backward(loss)
                for stage in stages:
                    stage.take(unit)
                total += float(loss.detach())
            losses.append(total / plan.microbatches)
    for stage in stages:
        stage.load(-1)
    return losses, model


def _stages(
    spec: TrainingSpec, profile: Profile, plan: Plan, model: nn.Module, minibatches: int
) -> "list[_ReferenceStage]":
    """Give each stage the parameters that it trains, a tied one to the first that uses it, and its
    units' versions.
    """
    layers, shape = {layer.name: layer.parameters for layer in profile.layers}, shape_of(plan)
    left = {id(each): name for name, each in model.named_parameters() if each.requires_grad}
    stages = []
    for number, stage in enumerate(plan.stages):
        here = (model.get_parameter(name) for layer in stage.layers for name in layers[layer])
        own = {left.pop(id(parameter)): parameter for parameter in here if id(parameter) in left}
        if not own:
            continue
        reference = _ReferenceStage(list(own.values()), spec.optimizer(own))
        for rank in shape.ranks[number]:  # replicas of a stage have different units
            updates = 0
            for instruction in stream(shape, number, rank, minibatches):
                match instruction:
                    case _ if instruction.stage != number:
                        continue
                    case Forward(unit=unit, version=version):
                        reference.used[unit] = updates if version is None else version
                    case Backward(unit=unit) | BackwardWeight(unit=unit):
                        reference.round_of[unit] = updates
                    case Update():
                        updates += 1
        reference.keep()
        stages.append(reference)
    return stages


@dataclass
class _ReferenceStage:
    """The parameters of one stage, and their values after each update."""

    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    used: dict[Unit, int] = field(default_factory=dict)  # the updates before a unit's forward
    # the update that a unit's gradient goes into
    round_of: dict[Unit, int] = field(default_factory=dict)
    versions: list[list[Tensor]] = field(default_factory=list)
    gradients: defaultdict[int, list[list[Tensor | None]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def keep(self) -> None:
        self.versions.append([parameter.detach().clone() for parameter in self.parameters])

    def load(self, version: int) -> None:
        for parameter, value in zip(self.parameters, self.versions[version], strict=True):
            parameter.data.copy_(value)
            parameter.grad = None

    def take(self, unit: Unit) -> None:
        """Keep a unit's gradients; update the newest weights with their mean when they are the
        round's last.
        """
        number = self.round_of[unit]
        self.gradients[number].append([parameter.grad for parameter in self.parameters])
        if len(self.gradients[number]) < list(self.round_of.values()).count(number):
            return
        self.load(-1)
        for parameter, *several in zip(self.parameters, *self.gradients.pop(number), strict=True):
            there = [gradient for gradient in several if gradient is not None]
            parameter.grad = torch.stack(there).mean(0) if there else None
        self.optimizer.step()
        self.keep()


def memory_cases(lab: Lab) -> Iterator[Case]:

    def compare(schedule: Schedule) -> Outcome:
        # glibc keeps what is freed. A worker that gives blocks back has the size of what it uses.
        with large_blocks_apart():
            profile = lab.profile(
                TRANSFORMER, MEMORY_BATCH_SIZE_GPU if lab.on_gpu else MEMORY_BATCH_SIZE_CPU
            )
        plan = even_plan(profile, schedule, (1,) * lab.workers)
        with environment({"MALLOC_MMAP_THRESHOLD_": "65536"}):
            reports = lab.train(TRANSFORMER, plan, MEMORY_STEPS).reports
        return memory_outcome(reports, LEAST_GPU if lab.on_gpu else LEAST_CPU)

    for schedule in (FLUSH, ONE_F_ONE_B):
        yield f"{schedule}", partial(compare, schedule)


def memory_outcome(reports: Sequence[WorkerReport], least: float) -> Outcome:
    errors = [report.predicted_memory_bytes / report.peak_memory_bytes - 1 for report in reports]
    said = []
    for report, error in zip(reports, errors, strict=True):
        predicted, measured = (
            format_bytes(report.predicted_memory_bytes),
            format_bytes(report.peak_memory_bytes),
        )
        said.append(
            f"worker {report.rank}: {predicted} predicted, {measured} measured ({error:+.1%})"
        )
    worst = min(errors) if min(errors) < least else max(errors)
    return judged(
        least <= worst <= MOST,
        f"{', '.join(said)}; limits {least:+.0%} and {MOST:+.0%}",
        worst,
        MOST,
    )


def failure_cases(lab: Lab) -> Iterator[Case]:
    yield "killed", partial(_killed, lab)


def _killed(lab: Lab) -> Outcome:
    plan, mark = (
        even_plan(lab.profile(CONVOLUTIONAL), ONE_F_ONE_B, (1,) * lab.workers),
        lab.folder / "killed",
    )
    with environment({KILLED: str(mark)}):
        try:
            lab.train(CONVOLUTIONAL, plan, 500 * STEPS)
        except PlannerError as error:
            seconds = (
                time.time() - float(mark.read_text(encoding="utf-8")) if mark.exists() else math.inf
            )
            told = seconds <= TOLD_S and all(
                words in error.message for words in ("worker 0 (stage 0)", "SIGKILL")
            )
            return judged(
                told,
                f"told after {seconds:.1f} s (limit {TOLD_S:g} s): {error.message}",
                seconds,
                TOLD_S,
            )
    return judged(False, "the run ended as if nothing had happened")
