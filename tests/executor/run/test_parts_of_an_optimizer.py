"""Optimizers and schedulers of the whole model, which every stage steps its part of, equal those of
one process.

The kinds: groups by name, by place in the list and by the shape of parameters; schedulers with a
value per group, with momentum, and made of others; parts of the optimizer's state on replicas;
going on under another cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.errors import ModelFileError, PlanError, PlannerError
from planner.executor.stage.separate import check_separate
from planner.formats.plan import Plan
from planner.model.optimizer_part import trained_parameters
from planner.model.spec import TrainingSpec, in_memory, load_model_file
from planner.options.training import CheckpointOptions
from planner.workers.job import Job
from tests.executor.plans import in_groups, make_plan, sharded, structural_profile
from tests.executor.processes import run_jobs
from tests.model import optimizers as people

pytestmark = pytest.mark.usefixtures("warm_start")

SAMPLES, SIZE, STEPS, SEED = 48, 4, 10, 3

MODEL = """
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import SequentialSampler, TensorDataset
{more}
DEPTH = 6

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(6, 16)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(DEPTH)]
        )
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        h = self.into(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.out(h)

def build_model():
    return Net()

def example_batch(batch_size):
    return (torch.randn(batch_size, 6),), torch.randint(0, 3, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def dataset():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (SAMPLES,), generator=generator))

def sampler(microbatch_size, microbatches, seed):
    return SequentialSampler(range(SAMPLES))
""".replace("SAMPLES", str(SAMPLES))

BY_DEPTH = """
def depth_of(name):
    if name.startswith("into"):
        return 0
    if name.startswith("out"):
        return DEPTH + 1
    return int(name.split(".")[1]) + 1

def optimizer(named_parameters):
    groups = {}
    for name, parameter in named_parameters:
        groups.setdefault(depth_of(name), []).append(parameter)
    rates = {depth: 1e-2 * 0.7 ** (DEPTH + 1 - depth) for depth in groups}
    described = [
        {"params": own, "lr": rates[depth], "depth": depth} for depth, own in sorted(groups.items())
    ]
    return torch.optim.AdamW(described, weight_decay=0.05)

def scheduler(optimizer):
    slow = [
        lambda step, depth=depth: min(1.0, (step + 1) / (12 - depth)) for depth in range(DEPTH + 2)
    ]
    return lr_scheduler.LambdaLR(optimizer, slow)
"""

BY_PLACE = """
def optimizer(parameters):
    slow, fast = parameters[:4], parameters[4:]
    groups = [
        {"params": slow, "lr": 1e-3, "weight_decay": 0.0},
        {"params": [each for each in fast if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in fast if each.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)

def scheduler(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, [1e-3, 1e-2, 2e-2], total_steps=20)
"""

WITH_MOMENTUM = """
def optimizer(named_parameters):
    named = list(named_parameters)
    head = [parameter for name, parameter in named if name.startswith("out")]
    body = [parameter for name, parameter in named if not name.startswith("out")]
    return torch.optim.SGD([{"params": body}, {"params": head, "lr": 0.2}], lr=0.05, momentum=0.9)

def scheduler(optimizer):
    return lr_scheduler.CyclicLR(optimizer, [0.01, 0.02], [0.1, 0.2], step_size_up=3)
"""

OF_OTHERS = """
def optimizer(parameters):
    matrices = [each for each in parameters if each.ndim > 1]
    vectors = [each for each in parameters if each.ndim < 2]
    return torch.optim.Adam([{"params": matrices}, {"params": vectors, "lr": 0.02}], lr=0.01)

def scheduler(optimizer):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    chained = lr_scheduler.ChainedScheduler([warm, lr_scheduler.ExponentialLR(optimizer, 0.9)])
    return chained if len(optimizer.param_groups) == 2 else None
"""

FROZEN = """
def optimizer(named_parameters):
    # All but the body: a stage may have nothing to step.
    return torch.optim.SGD(
        [parameter for name, parameter in named_parameters if name.startswith("out")], lr=0.1
    )

def scheduler(optimizer):
    first = lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=4)
    return lr_scheduler.SequentialLR(
        optimizer, [first, lr_scheduler.CosineAnnealingLR(optimizer, 8)], [4]
    )
"""

FILES = {
    "depth": BY_DEPTH,
    "place": BY_PLACE,
    "momentum": WITH_MOMENTUM,
    "others": OF_OTHERS,
    "frozen": FROZEN,
}


def written(folder: Path, name: str, content: str, more: str = "") -> Path:
    path = folder / f"{name}.py"
    path.write_text(MODEL.replace("{more}", more) + content, encoding="utf-8")
    return path


def in_one_process(spec: TrainingSpec, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with the model file's functions in a plain loop; return losses and weights."""
    torch.manual_seed(SEED)
    model = spec.build_model()
    optimizer = spec.optimizer(dict(model.named_parameters()))
    scheduler, data = spec.scheduler(optimizer), spec.dataset()
    assert scheduler is not None
    assert data is not None
    losses = []
    for step in range(steps):
        first = step * SIZE % SAMPLES
        samples = [data[index] for index in range(first, first + SIZE)]
        inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def jobs_of(folder: Path, plans: Sequence[tuple[Path, Plan]]) -> list[Job]:
    return [
        Job(
            model=str(path),
            plan=plan,
            steps=STEPS,
            seed=SEED,
            save_weights=str(folder / f"weights-{number}.pt"),
        )
        for number, (path, plan) in enumerate(plans)
    ]


def test_stages_have_the_rates_of_one_process(tmp_path: Path) -> None:
    """To the bit, where nothing is averaged."""
    paths = [written(tmp_path, name, content) for name, content in FILES.items()]
    made = [structural_profile(path, SIZE) for path in paths]
    plans = [
        (path, make_plan(each, (1, 1), "1f1b-flush"))
        for path, each in zip(paths, made, strict=True)
    ]
    # A minibatch of two microbatches, on four stages of two workers, and on two replicas that
    # divide the state.
    smaller = structural_profile(paths[1], SIZE // 2)
    plans.append((paths[1], make_plan(smaller, (1,) * 4, "interleaved", 2, chunks=2)))
    plans.append((paths[1], sharded(make_plan(smaller, (2,), "1f1b-flush", 2))))
    jobs = jobs_of(tmp_path, plans)
    for number, (job, result) in enumerate(zip(jobs, run_jobs(jobs, tmp_path), strict=True)):
        spec = load_model_file(job.model)
        losses, weights = in_one_process(spec, STEPS)
        saved = torch.load(str(job.save_weights), weights_only=True)
        assert saved.keys() == weights.keys()
        exact = number < len(FILES)
        rtol, atol = (0.0, 0.0) if exact else (1e-4, 1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(
                saved[name], value, rtol=rtol, atol=atol, msg=f"{job.model}: {name}"
            )
        assert [each.loss for each in result.losses] == pytest.approx(losses, rel=1e-6)


def test_groups_go_on_under_another_cut(tmp_path: Path) -> None:
    path = written(tmp_path, "depth", BY_DEPTH)
    made = structural_profile(path, SIZE)
    two = make_plan(made, (1, 1), "1f1b-flush")
    folder = str(tmp_path / "checkpoints")
    saving = CheckpointOptions(checkpoint_folder=folder, checkpoint_every=5)
    names = [layer for stage in two.stages for layer in stage.layers]
    moved = len(two.stages[0].layers) + 3
    other = _cut_at(made, two, names, moved)
    jobs = [
        Job(model=str(path), seed=SEED, plan=two, steps=5, checkpoints=saving),
        Job(
            model=str(path),
            seed=SEED,
            plan=other,
            steps=STEPS,
            checkpoints=CheckpointOptions(checkpoint_folder=folder, resume="auto"),
            save_weights=str(tmp_path / "weights.pt"),
        ),
    ]
    run_jobs(jobs, tmp_path)
    _, weights = in_one_process(load_model_file(str(path)), STEPS)
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, value in weights.items():
        assert torch.equal(saved[name], value), name


def _cut_at(made: planner.Profile, plan: Plan, names: Sequence[str], count: int) -> Plan:
    """Return the plan of two stages, of which the first has so many layers."""
    cluster = planner.flat_cluster(2, 1e9)
    found = planner.price(
        made, cluster, [names[count - 1]], schedule=plan.schedule.name, microbatches=1
    )
    assert [len(stage.layers) for stage in found.stages] == [count, len(names) - count]
    return found


NORMALISED = """
class Normalised(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        every = [
            each for group in self.param_groups for each in group["params"] if each.grad is not None
        ]
        norm = torch.stack([each.grad.norm() for each in every]).norm()
        for each in every:
            each.sub_(each.grad / norm, alpha=0.1)

def optimizer(parameters):
    return Normalised(parameters, 0.1)
"""


def test_a_run_that_would_combine_parts_is_refused_and_one_stage_trains(tmp_path: Path) -> None:
    """The way out that the hint names is gone, too."""
    path = written(tmp_path, "normalised", NORMALISED)
    made = structural_profile(path, SIZE)
    message = "2 stages with an optimizer each, but Normalised combines parameters"
    with pytest.raises(PlannerError, match=message) as error:  # of a worker
        planner.train(path, make_plan(made, (1, 1), "1f1b-flush"), steps=2)
    assert "`max_stages=1`" in error.value.hint
    alone = planner.solve(
        made, planner.flat_cluster(2, 1e9), max_stages=1, tensor=[1], shard_optimizer="never"
    )
    assert planner.train(path, alone, steps=2).minibatches == 2


def plan_of(tmp_path: Path, replicas: tuple[int, ...]) -> Plan:
    return make_plan(
        structural_profile(written(tmp_path, "place", BY_PLACE), SIZE), replicas, "1f1b-flush", 2
    )


NET = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
PARTS = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]


def check(optimizer: object, plan: Plan, parts: list[list[str]] = PARTS) -> None:
    batch = (torch.zeros(2, 6),), torch.zeros(2)
    spec = in_memory(NET, example_batch=batch, optimizer=optimizer)  # type: ignore[arg-type]
    check_separate(spec, plan, trained_parameters(NET), parts, torch.device("cpu"))


def test_what_is_divided_decides(tmp_path: Path) -> None:
    """Stages divide parameters, and replicas or ranks divide elements of them; replicas alone
    divide nothing.
    """
    two, one, pair = plan_of(tmp_path, (1, 1)), plan_of(tmp_path, (1,)), plan_of(tmp_path, (2,))
    whole = [[name for part in PARTS for name in part]]
    for optimizer in people.COMBINING.values():
        with pytest.raises(
            PlanError, match=r"has 2 stages with an optimizer each, but .* combines parameters"
        ):
            check(optimizer, two)
        check(optimizer, one, whole)
        check(optimizer, pair, whole)
    check(torch.optim.AdamW, two)

    wrong = partial(people.FalselyElementwise, max_grad_norm=None)
    check(wrong, two)
    check(wrong, pair, whole)
    for divided in (sharded(pair), in_groups(one, 2)):
        with pytest.raises(PlanError, match="combines elements of parameters"):
            check(wrong, divided, whole)
        with pytest.raises(PlanError, match="combines elements of parameters"):
            check(_clipping_elementwise, divided, whole)
        check(torch.optim.AdamW, divided, whole)


def clipped_by_value(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """As people write it: over the parameters that optimizer() is given."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(parameters, 1e-3))
    return optimizer


def clamped(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    def clamp(*_: object) -> None:
        for parameter in parameters:
            parameter.data.clamp_(-0.05, 0.05)

    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(clamp)
    return optimizer


def clipped_in_groups(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    def clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_value_(group["params"], 1e-3)

    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def test_what_remembers_parameters_does_not_step_masters(tmp_path: Path) -> None:
    """With one worker, too, which has masters in the place of weights in half precision."""
    whole = [[name for part in PARTS for name in part]]
    for replicas in ((1,), (2,)):
        plan = plan_of(tmp_path, replicas)
        masters = plan.model_copy(update={"master_weights": "bfloat16"})
        for remembering in (clipped_by_value, clamped):
            check(remembering, plan, whole)
            with pytest.raises(
                PlanError, match=r"masters of weights in bfloat16, but it remembers the par"
            ) as error:
                check(remembering, masters, whole)
            assert "from its param_groups" in error.value.hint
        for optimizer in (clipped_in_groups, torch.optim.Adagrad, *people.COMBINING.values()):
            check(optimizer, masters, whole)


def test_what_remembers_a_parameter_that_one_replica_has_whole_is_refused(tmp_path: Path) -> None:
    def clamped_whole(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: Any = clamped(parameters)
        optimizer.whole_parameters = lambda: optimizer.param_groups[0]["params"]
        return optimizer  # type: ignore[no-any-return]

    whole = [[name for part in PARTS for name in part]]
    with pytest.raises(PlanError, match="combines elements of parameters"):
        check(clamped_whole, sharded(plan_of(tmp_path, (2,))), whole)


def _clipping_elementwise(parameters: object) -> torch.optim.Optimizer:
    return people.clipping_adamw(parameters)


def test_random_updates_differ_between_replicas(tmp_path: Path) -> None:
    two, pair = plan_of(tmp_path, (1, 1)), plan_of(tmp_path, (2,))
    whole = [[name for part in PARTS for name in part]]
    noisy = lambda parameters: people.Noisy(parameters, lr=0.1)  # noqa: E731
    accepting = lambda parameters: people.NoisyBySelf(parameters, lr=0.1)  # noqa: E731
    with pytest.raises(PlanError, match=r"Noisy draws random numbers in step\(\)") as error:
        check(noisy, two)
    assert "Noisy.separable = True" in error.value.hint
    check(accepting, two)
    for each in (noisy, accepting):
        with pytest.raises(PlanError, match="replicas of a stage would not stay equal"):
            check(each, pair, whole)


def test_optimizers_that_communicate_are_refused_by_profile(tmp_path: Path) -> None:
    more = "import torch.distributed as dist\n"
    averaging = """
class Averaging(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups if dist.is_initialized() else ():
            for each in group["params"]:
                dist.all_reduce(each.grad)
        super().step()

def optimizer(parameters):
    return Averaging(parameters, lr=0.1)
"""
    path = written(tmp_path, "averaging", averaging, more)
    with pytest.raises(
        ModelFileError,
        match=r"step\(\) of Averaging communicates with other processes \(allreduce\)",
    ):
        planner.profile(path, batch_size=SIZE, seconds=0.1)
    plan = make_plan(structural_profile(path, SIZE), (1, 1), "1f1b-flush")
    with pytest.raises(PlannerError, match="communicates"):  # of a worker
        planner.train(path, plan, steps=2)


def test_profile_says_what_solve_takes_into_account(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, "normalised", NORMALISED)
    made = planner.profile(path, batch_size=SIZE, seconds=0.1)
    assert made.optimizer_separable is False
    assert "Normalised combines parameters" in caplog.text
    plan = planner.solve(made, planner.flat_cluster(2, 1e5))
    assert len(plan.stages) == 1
    assert not plan.stages[0].sharded


def test_schedulers_are_refused_by_profile(tmp_path: Path) -> None:
    waiting = (
        NORMALISED
        + "\ndef scheduler(optimizer):\n    return lr_scheduler.ReduceLROnPlateau(optimizer)\n"
    )
    with pytest.raises(ModelFileError, match="follows the number of steps alone"):
        planner.profile(written(tmp_path, "waiting", waiting), batch_size=SIZE, seconds=0.1)
