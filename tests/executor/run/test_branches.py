"""Stages that are no runs of consecutive layers: two towers whose layers take turns, and a join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import PlanError
from planner.executor.run.data import BatchSource, make_batches
from planner.executor.run.stages import build_modules
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.capture.capture import capture_file
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.stage import StageModule, build_stage
from planner.options.training import TrainingOptions
from planner.schedule.instructions import Unit
from planner.schedule.registry import find
from planner.solver.assemble import assemble
from planner.solver.problem.layer_graph import LayerGraph
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.workers.job import Job
from tests.executor.plans import structural_profile
from tests.executor.processes import run_jobs
from tests.executor.reference import delayed_updates, plain_training

BATCH_SIZE = 4
SEED = 3
MINIBATCHES = 5

# BatchNorm and dropout, whose state and random numbers belong to a layer; evaluation has other
# layers than training.
TOWERS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 16)
        self.left = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.right = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(16, track_running_stats=True) for _ in range(2)])
        self.right_drops = nn.ModuleList([nn.Dropout(0.3) for _ in range(3)])
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.stem(x)
        a, b = x, x
        for left, right, drop in zip(self.left, self.right, self.right_drops):
            a = torch.tanh(left(a))
            b = drop(torch.tanh(right(b)))
        a, b = self.norms[0](a), self.norms[1](b)
        return self.head(torch.cat([a, RIGHT], -1))

def build_model():
    return Net()

def example_batch(batch_size):
    return (torch.randn(batch_size, 12),), torch.randint(0, 5, (batch_size,))

def dataset():
    torch.manual_seed(11)
    return torch.utils.data.TensorDataset(torch.randn(24, 12), torch.randint(0, 5, (24,)))

def evaluation_dataset():
    return dataset()

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""


TWO_USERS = "b"  # of the stem's value: the first layers of the towers
THREE_USERS = "b + x"


def write(folder: Path, users: str = TWO_USERS) -> Path:
    path = folder / "towers.py"
    path.write_text(TOWERS.replace("RIGHT", users), encoding="utf-8")
    return path


def stages_of(profile: Profile, first: str) -> list[frozenset[int]]:
    """The stem and one tower, then the rest: the towers' layers take turns in the profile."""
    names = [layer.name for layer in profile.layers]
    one = frozenset(place for place, name in enumerate(names) if name.startswith(("stem", first)))
    return [one, frozenset(range(len(names))) - one]


def plan_of(
    profile: Profile,
    stages: Sequence[frozenset[int]],
    replicas: Sequence[int] = (1, 1),
    schedule: str = "1f1b-flush",
    microbatches: int = 3,
    recompute: Sequence[str] = (),
) -> Plan:
    """The plan of these stages, the first of which recomputes the layers named."""
    many = microbatches if find(schedule).divides else 1
    layer_costs = LayerCosts(profile)
    problem = Problem(layer_costs, Setting(flat_cluster(sum(replicas), 1e9), find(schedule), many))
    before: frozenset[int] = frozenset()
    candidates = []
    for layers, count in zip(stages, replicas, strict=True):
        candidates.append(Candidate(before, layers, StageOptions(count)))
        before |= layers
    if recompute:
        group = frozenset(layer_costs.position[name] for name in recompute)
        again = StageOptions(replicas[0], recompute=(group,))
        candidates[0] = replace(candidates[0], options=again)
    return assemble(problem, Evaluation(tuple(candidates), problem.price(candidates)))


def unsplit(spec: TrainingSpec) -> StageModule:
    torch.manual_seed(SEED)
    model = spec.build_model()
    graph = capture_file(spec, spec.example_batch(BATCH_SIZE), model)
    return build_stage(graph, [layer.name for layer in graph.layers])


def is_in_order(profile: Profile, stages: Sequence[frozenset[int]]) -> bool:
    return stages[0] == frozenset(range(len(stages[0])))


@pytest.mark.parametrize(("first", "users"), [("left", THREE_USERS), ("left", TWO_USERS)])
def test_synchronous_training_is_that_of_one_process_to_the_bit(
    first: str, users: str, tmp_path: Path
) -> None:
    """One microbatch: gradients of several are averaged in another way than in a plain loop."""
    path = write(tmp_path, users)
    profile = structural_profile(path, BATCH_SIZE)
    stages = stages_of(profile, first)
    assert not is_in_order(profile, stages)
    again = [profile.layers[place].name for place in sorted(stages[0])][1:4]
    plans = [
        plan_of(profile, stages, microbatches=1),
        plan_of(profile, stages, microbatches=1, recompute=again),
    ]
    saved = [str(tmp_path / f"{number}.pt") for number in range(2)]
    options = TrainingOptions(evaluate_every=MINIBATCHES)
    jobs = [
        Job(
            model=str(path),
            plan=plan,
            steps=MINIBATCHES,
            seed=SEED,
            save_weights=file,
            options=options,
        )
        for plan, file in zip(plans, saved, strict=True)
    ]
    results = run_jobs(jobs, tmp_path)

    spec = load_model_file(path)
    data = make_batches(spec, BATCH_SIZE, 1, SEED)

    def losses_of(model: nn.Module, minibatch: int) -> list[Tensor]:
        assert isinstance(model, StageModule)
        model.set_random_key(SEED, minibatch, 0)
        return [model(data.batch(Unit(minibatch)), {})["loss"]]

    losses, expected = plain_training(unsplit(spec), spec.optimizer, losses_of, MINIBATCHES)
    for result, file in zip(results, saved, strict=True):
        weights = torch.load(file, weights_only=True)
        assert [entry.loss for entry in result.losses] == losses
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        assert len(result.evaluations) == 1
        assert result.evaluations == results[0].evaluations


@pytest.mark.parametrize("replicas", [(1, 1), pytest.param((2, 1), marks=pytest.mark.slow)])
def test_asynchronous_training_delays_updates_to_the_bit(
    replicas: tuple[int, ...], tmp_path: Path
) -> None:
    path = write(tmp_path)
    profile = structural_profile(path, BATCH_SIZE)
    stages = stages_of(profile, "left")
    plan = plan_of(profile, stages, replicas, "1f1b")
    job = Job(
        model=str(path), plan=plan, steps=7, seed=SEED, save_weights=str(tmp_path / "weights.pt")
    )
    (result,) = run_jobs([job], tmp_path)

    spec = load_model_file(path)
    whole = unsplit(spec)
    data = make_batches(spec, BATCH_SIZE, 1, SEED)

    def loss_of(model: nn.Module, minibatch: int, data: BatchSource = data) -> Tensor:
        assert isinstance(model, StageModule)
        model.set_random_key(SEED, minibatch, 0)
        loss: Tensor = model(data.batch(Unit(minibatch)), {})["loss"]
        return loss

    owner = {name: place for place, layer in enumerate(profile.layers) for name in layer.parameters}
    names = [
        [name for name, _ in whole.named_parameters() if owner[name] in layers] for layers in stages
    ]
    losses, expected = delayed_updates(whole, names, replicas, spec.optimizer, loss_of, 7)
    assert [entry.loss for entry in result.losses] == losses
    weights = torch.load(str(job.save_weights), weights_only=True)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("users", [TWO_USERS, THREE_USERS])
def test_gradients_that_would_add_up_in_another_order_are_refused(
    users: str, tmp_path: Path
) -> None:
    path = write(tmp_path, users)
    profile = structural_profile(path, BATCH_SIZE)
    plan = plan_of(profile, stages_of(profile, "right"))
    job = Job(model=str(path), plan=plan, steps=1)
    with pytest.raises(
        PlanError, match=r"'right.0' is in an earlier stage than 'left.0'.*in another order"
    ):
        build_modules(job, [0], load_model_file(path), "cpu")


def test_the_search_proposes_no_plan_that_is_refused(tmp_path: Path) -> None:
    """The tower that uses the stem's value first is in the first stage."""
    for users in (TWO_USERS, THREE_USERS):
        profile = structural_profile(write(tmp_path, users), BATCH_SIZE)
        graph = LayerGraph(LayerCosts(profile))
        downsets = graph.downsets(10**4)
        assert downsets is not None
        for first in ("left", "right"):
            layers, _ = stages_of(profile, first)
            assert (graph.of_layers(layers) in downsets) == (first == "left")
