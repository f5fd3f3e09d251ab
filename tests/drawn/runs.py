"""Runs drawn at random over what a plan and its options may combine, and what each must come to.

The drawn model files vary what people write; these vary how it is trained: how workers share a
model, under which schedule, with which options, and whether a run is resumed under another plan.
Models are small and in float64 where they can be, so that rounding is far from what a wrong
gradient, a wrong sample or another dropout mask would do. Other draws have the same runs in half
precision, or through the compiler.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

import planner
from planner.executor.run.data import BatchSource, make_batches
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.batch import Batch
from planner.model.capture.capture import capture_file
from planner.model.options import PLAIN, ModuleOptions
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.stage import StageModule, build_stage
from planner.options.option import part_of
from planner.options.training import CheckpointOptions, StepOptions, TrainingOptions
from planner.schedule.instructions import CHUNKS, Unit
from planner.schedule.registry import find
from planner.schedule.schedule import Schedule
from planner.workers.job import Job
from tests.drawn.trainings import MICROBATCH_SIZE, chunked
from tests.executor.models import write_model
from tests.executor.plans import (
    by_sequences,
    by_tokens,
    in_groups,
    make_plan,
    scattered,
    sharded,
    structural_profile,
)
from tests.executor.reference import Weights, delayed_updates, double_buffered, plain_training
from tests.executor.run.test_exactness import recomputing

SEED = 3
MOST_WORKERS = 4

Dividing = Literal["nothing", "layers", "tokens", "sequences", "samples"]
Running = Literal["as written", "under autocast", "with masters", "compiled"]

OPTIONS: dict[Running, ModuleOptions] = {
    "as written": PLAIN,
    "under autocast": ModuleOptions(autocast=torch.bfloat16),
    "with masters": ModuleOptions(half=torch.bfloat16),
    "compiled": ModuleOptions(compiled=True),
}

IN_DOUBLE = ("attention", "packed", "flattened", "tied head", "language")
WITH_EXPERTS = ("experts", "experts alone")  # whose products are in bfloat16
SYNCHRONOUS = ("1f1b-flush", "gpipe", "zb-h1", "interleaved", "zb-v", "v-half", "v-min")
ASYNCHRONOUS = ("1f1b", "2bw")

# Appended to a model file: rates that change with each update.
RATES = """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update / 3))
"""


@dataclass(frozen=True)
class Division:
    """How workers share a model."""

    replicas: tuple[int, ...]  # per stage, of those on one worker as well
    degree: int = 1  # ranks of a replica
    dividing: Dividing = "nothing"  # what those ranks divide
    level: int = 0  # of what replicas shard, as ZeRO numbers it
    shard_group: int | None = None  # of replicas that shard between them; None: all
    again: tuple[bool | int, ...] = ()  # what each stage recomputes, as `recomputing` takes it
    scattered: bool = False  # over the ranks

    @property
    def own_samples(self) -> int:
        """How many ranks have samples of their own of each microbatch."""
        return self.degree if self.dividing == "samples" else 1

    def workers(self, chunks: int) -> int:
        return sum(self.replicas) * self.degree // chunks


@dataclass(frozen=True)
class DrawnRun:
    """A run, in one part or in two: the second resumes the first, under a plan of its own."""

    seed: int
    model: str
    optimizer: str
    schedule: Schedule
    microbatches: int
    divisions: tuple[Division, ...]
    steps: int  # of each part
    samples: int | None = None  # of the dataset; None: random batches
    drop_last: bool = False
    clip: float | None = None
    rates: bool = False  # that change with each update
    loss_chunks: int = 1
    deferred: bool | None = None
    own_loop: bool = False  # whether a script hands in the minibatches
    running: Running = "as written"

    @property
    def own_samples(self) -> int:
        """See `Division.own_samples`; all parts have equally many."""
        return self.divisions[0].own_samples

    @property
    def options(self) -> ModuleOptions:
        """How its modules run."""
        return OPTIONS[self.running]

    @property
    def in_double(self) -> bool:
        return self.model in IN_DOUBLE and self.running in ("as written", "compiled")

    @property
    def divides(self) -> bool:
        """Whether ranks share what one process computes in one piece."""
        return any(each.degree > 1 for each in self.divisions)


def draw_run(seed: int) -> DrawnRun:
    """Draw a run; the same for the same seed."""
    chosen = random.Random(seed)
    asynchronous = chosen.random() < 0.25
    schedule = find(chosen.choice(ASYNCHRONOUS if asynchronous else SYNCHRONOUS))
    # 2BW has a microbatch for each replica.
    microbatches = chosen.choice((1, 2, 3, 4)) if schedule.divides else 1
    microbatches = 4 if schedule.name == "2bw" else microbatches
    # Under asynchronous schedules stages that share a weight step it at the depth of the deepest.
    # That formula, for which the weight's copies need names of their own, is tested elsewhere.
    models = (*IN_DOUBLE, *WITH_EXPERTS)
    model = chosen.choice([each for each in models if not (asynchronous and each == "tied head")])
    # Of a dataset the last minibatch of an epoch may be smaller; 2BW's reference knows none such.
    samples = chosen.choice((None, 21, 36)) if schedule.name != "2bw" else None
    resumed = not asynchronous and samples is not None and chosen.random() < 0.4

    first = _draw_division(chosen, schedule, model, microbatches)
    divisions = [first]
    if resumed:
        second = _draw_division(chosen, schedule, model, microbatches)
        if first.own_samples == second.own_samples:
            divisions.append(second)
    whole_loss = any(each.degree > 1 or each.level > 1 for each in divisions)
    return DrawnRun(
        seed=seed,
        model=model,
        # AdamW makes steps of rounding noise, of which there is much in bfloat16.
        optimizer=chosen.choice(("sgd", "momentum", "adamw")[: 3 if model in IN_DOUBLE else 2]),
        schedule=schedule,
        microbatches=microbatches,
        divisions=tuple(divisions),
        steps=chosen.choice((4, 7)),
        samples=samples,
        drop_last=chosen.random() < 0.3,
        clip=chosen.choice((None, None, 0.3)),
        rates=not asynchronous and chosen.random() < 0.3,
        loss_chunks=1 if whole_loss else chosen.choice((1, 3)),
        deferred=chosen.choice((None, None, True)),
        own_loop=samples is not None and chosen.random() < 0.5,
    )


def draw_run_in(running: Running, seed: int) -> DrawnRun:
    """Draw a run whose modules run in such a way: the same for the same seed."""
    # The models with experts convert some values themselves, which half weights do not go with.
    models = IN_DOUBLE if running == "with masters" else (*IN_DOUBLE, *WITH_EXPERTS)
    drawn = map(draw_run, count(seed, step=1000))
    run = replace(next(run for run in drawn if run.model in models), running=running)
    # AdamW makes steps of rounding noise.
    return run if run.in_double or run.optimizer != "adamw" else replace(run, optimizer="momentum")


def _draw_division(
    chosen: random.Random, schedule: Schedule, model: str, microbatches: int
) -> Division:
    """Draw how at least two and at most `MOST_WORKERS` workers share a model."""
    chunks = _chunks(schedule)
    while True:
        stages = chosen.choice((1, 1, 2, 2, 3))
        replicas = [chosen.choice((1, 1, 2)) for _ in range(stages)]
        if stages == 1:
            replicas = [chosen.choice((1, 2, 4))]
        if chunks > 1:
            replicas = [replicas[0]] * stages
        degree = 1 if model == "language" else chosen.choice((1, 1, 2, 2, 4))
        found = Division(tuple(replicas * chunks), degree)
        if 2 <= found.workers(chunks) <= MOST_WORKERS:
            break

    dividing: Dividing = "nothing"
    if degree > 1:
        kinds: tuple[Dividing, ...] = ("layers", "tokens", "sequences")
        dividing = "samples" if model == "experts alone" else chosen.choice(kinds)
    level = chosen.choice((0, 0, 1)) if max(replicas) > 1 else 0
    shares_evenly = microbatches % replicas[0] == 0 and not schedule.asynchronous
    if len(found.replicas) == 1 and replicas[0] > 1 and shares_evenly:
        level = chosen.choice((0, 1, 2, 3))
    grouped = level > 1 and replicas[0] == 4 and chosen.random() < 0.5
    # a stage of one layer, as `language` may have, has no parts
    ways = (False, False, True) if model == "language" else (False, False, True, 2)
    again = tuple(chosen.choice(ways) for _ in found.replicas)
    return replace(
        found,
        dividing=dividing,
        level=level,
        shard_group=2 if grouped else None,
        again=again if chosen.random() < 0.5 else (),
        scattered=degree == 1 and chosen.random() < 0.3,
    )


# Appended to a model file whose weights are in another precision.
CONVERTED = """
def build_model(build=build_model):
    return build().{precision}()
"""


def _chunks(schedule: Schedule) -> int:
    if not schedule.chunked:
        return 1
    return schedule.fixed_chunks or CHUNKS


def write_file(run: DrawnRun, folder: Path) -> Path:
    """Write the run's model file, and return its path."""
    more = RATES if run.rates else ""
    precision = "double" if run.in_double else "float"
    if run.model in IN_DOUBLE:
        more += CONVERTED.format(precision=precision)
    return write_model(folder, run.model, run.optimizer, samples=run.samples, more=more)


def jobs_of(run: DrawnRun, path: Path, folder: Path) -> list[Job]:
    """Return the jobs that are the parts of the run; the last one saves its weights."""
    profile = structural_profile(path, MICROBATCH_SIZE, run.options)
    profile = profile.model_copy(update={"chunked_loss": chunked(path, run.loss_chunks)})
    last = len(run.divisions) - 1
    jobs = []
    for number, division in enumerate(run.divisions):
        checkpoints = CheckpointOptions(
            checkpoint_every=run.steps,
            checkpoint_folder=str(folder / "checkpoints"),
            resume="auto" if number else None,
        )
        job = Job(
            model=str(path),
            plan=_plan(run, division, profile),
            steps=run.steps * (number + 1),
            seed=SEED,
            options=TrainingOptions(clip_grad_norm=run.clip, drop_last=run.drop_last),
            save_weights=str(folder / "weights.pt") if number == last else None,
            defer_weights=run.deferred,
            checkpoints=checkpoints if last else CheckpointOptions(),
        )
        jobs.append(job)
    return jobs


def _plan(run: DrawnRun, division: Division, profile: Profile) -> Plan:
    chunks = _chunks(run.schedule)
    plan = make_plan(profile, division.replicas, run.schedule.name, run.microbatches, chunks=chunks)
    if division.again:
        plan = recomputing(plan, division.again)
    if division.level:
        plan = sharded(plan, division.level, division.shard_group)
    if division.scattered:
        plan = scattered(plan)

    if division.dividing == "sequences":
        plan = by_sequences(plan, division.degree)
    elif division.degree > 1:
        plan = in_groups(plan, division.degree)
    if division.dividing == "tokens":
        plan = by_tokens(plan)
    return plan.model_copy(update={"by_samples": division.dividing == "samples"})


def losses_by_own_loop(job: Job) -> list[float]:
    """Train a job as a script with a loop of its own does, on the same minibatches."""
    spec = load_model_file(job.model)
    plan = job.plan
    with planner.pipeline(
        plan, job.model, seed=job.seed, **vars(part_of(job.options, StepOptions))
    ) as pipeline:
        first = 0
        if job.checkpoints.resume is not None:
            first = pipeline.load_checkpoint(job.checkpoints.checkpoint_folder)
        assert plan.microbatch_size is not None
        data = make_batches(
            spec,
            plan.microbatch_size,
            plan.microbatches,
            job.seed,
            drop_last=job.options.drop_last,
        )
        for number in range(first, job.steps or 0):
            minibatch = _whole_minibatch(data, number)
            pipeline.step((minibatch.args, minibatch.kwargs, minibatch.target))
        if job.checkpoints.checkpoint_every is not None:
            pipeline.save_checkpoint(job.checkpoints.checkpoint_folder)
        if job.save_weights is not None:
            pipeline.save_weights(job.save_weights)
        pipeline.drain()
        return [loss for _, loss in sorted(pipeline.losses.items())]


def _whole_minibatch(data: BatchSource, number: int) -> Batch:
    units = [Unit(number, part) for part in range(data.microbatches)]
    parts = [data.batch(unit) for unit in units if data.size(unit)]
    trees = [(part.args, part.kwargs, part.target) for part in parts]
    args, kwargs, target = tree_map(lambda *tensors: torch.cat(tensors), *trees)
    return Batch(args, kwargs, target)


def expected_of(run: DrawnRun, path: Path, plan: Plan) -> tuple[list[float], Weights]:
    """Return the losses and the final weights of one process without stages, or for asynchronous
    schedules of the formula that the schedule states.
    """
    spec = load_model_file(str(path))
    torch.manual_seed(SEED)
    model = spec.build_model()  # before the batch, which also draws random numbers
    options = replace(run.options, compiled=False)
    graph = capture_file(spec, spec.example_batch(MICROBATCH_SIZE), model, options=options)
    alone = build_stage(graph, [layer.name for layer in graph.layers])
    whole = alone if options.half is None else WithMasters(alone)
    parts = run.microbatches * run.own_samples
    data = make_batches(
        spec, MICROBATCH_SIZE // run.own_samples, parts, SEED, drop_last=run.drop_last
    )

    steps = run.steps * len(run.divisions)
    make = partial(_optimizer, spec, run)
    if not run.schedule.asynchronous:
        losses = partial(_weighed_losses, data, parts)
        return _rounded(run, *plain_training(whole, make, losses, steps))

    owner = {name: layer.name for layer in graph.layers for name in layer.parameters}
    trained = [name for name, _ in whole.named_parameters()]
    names = [
        [name for name in trained if owner[_own_name(name)] in stage.layers]
        for stage in plan.stages
    ]
    loss = partial(_loss_of_ranks, data, run.own_samples)
    if run.schedule.divides:
        found = double_buffered(whole, names, plan.replicas, make, loss, steps, run.microbatches)
    else:
        found = delayed_updates(whole, names, plan.replicas, make, loss, steps)
    return _rounded(run, *found)


class WithMasters(nn.Module):
    """A whole model in half precision whose trained weights are copies of it in float32, which are
    rounded in every forward.
    """

    def __init__(self, whole: StageModule) -> None:
        super().__init__()
        self._whole = (whole,)  # in a tuple, so that the masters are the only parameters
        for name, parameter in whole.named_parameters():
            self.register_parameter(
                name.replace(".", "|"),
                nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad),
            )

    def set_random_key(self, seed: int, minibatch: int, microbatch: int) -> None:
        (whole,) = self._whole
        whole.set_random_key(seed, minibatch, microbatch)

    def forward(self, batch: Batch, received: dict[str, Tensor]) -> dict[str, Tensor]:
        (whole,) = self._whole
        halves = {
            _own_name(name): master.to(dict(whole.named_parameters())[_own_name(name)].dtype)
            for name, master in self.named_parameters()
        }
        found: dict[str, Tensor] = functional_call(whole, halves, (batch, received))
        return found


def _own_name(name: str) -> str:
    return name.replace("|", ".")


def _rounded(run: DrawnRun, losses: list[float], weights: Weights) -> tuple[list[float], Weights]:
    """Return the weights as a run saves them, which are those that it computes with."""
    half = run.options.half
    if half is None:
        return losses, weights
    return losses, {_own_name(name): weight.to(half) for name, weight in weights.items()}


def _optimizer(
    spec: TrainingSpec, run: DrawnRun, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Make the optimizer of some parameters, which clips their gradients and changes its rates as
    the run does.
    """
    held = list(parameters)
    optimizer: torch.optim.Optimizer = spec.optimizer(held)
    if run.clip is not None:
        _before_step(optimizer, partial(nn.utils.clip_grad_norm_, held, run.clip))
    if run.rates:
        _after_step(optimizer, spec.functions["scheduler"](optimizer).step)
    return optimizer


def _before_step(optimizer: torch.optim.Optimizer, first: Callable[[], object]) -> None:
    def call(*_: object) -> None:
        first()

    optimizer.register_step_pre_hook(call)


def _after_step(optimizer: torch.optim.Optimizer, then: Callable[[], object]) -> None:
    def call(*_: object) -> None:
        then()

    optimizer.register_step_post_hook(call)


def _weighed_losses(
    data: BatchSource, parts: int, model: nn.Module, minibatch: int
) -> list[Tensor]:
    """Return losses whose mean is that of the minibatch: parts of more samples count for more."""
    units = [Unit(minibatch, part) for part in range(parts)]
    units = [unit for unit in units if data.size(unit)]
    return [_loss(data, model, unit) * (data.share(unit) * len(units)) for unit in units]


def _loss_of_ranks(
    data: BatchSource, ranks: int, model: nn.Module, minibatch: int, microbatch: int = 0
) -> Tensor:
    """Return the mean over the samples that ranks have of a microbatch."""
    parts = range(microbatch * ranks, (microbatch + 1) * ranks)
    units = [unit for part in parts if data.size(unit := Unit(minibatch, part))]
    samples = sum(data.size(unit) for unit in units)
    losses = [_loss(data, model, unit) * (data.size(unit) / samples) for unit in units]
    return torch.stack(losses).sum()


def _loss(data: BatchSource, model: nn.Module, unit: Unit) -> Tensor:
    assert isinstance(model, StageModule | WithMasters)
    model.set_random_key(SEED, unit.minibatch, unit.microbatch)
    loss: Tensor = model(data.batch(unit), {})["loss"]
    return loss
