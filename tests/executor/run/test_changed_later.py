"""What a loss or a model does later in a run than any trial sees is noticed while training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.api.running import train
from planner.errors import PlannerError
from planner.formats.plan import Plan
from planner.formats.profile import LossMean
from planner.model.spec import load_model_file
from planner.options.training import TrainingOptions
from planner.workers.job import TrainResult
from tests.executor import eager
from tests.executor.eager import Case
from tests.executor.plans import make_plan, structural_profile
from tests.executor.reference import Weights

pytestmark = pytest.mark.usefixtures("warm_start")

SIZE, STEPS = 4, 12

COMMON = """
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import Dataset

class Net(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 5),
        )

    def forward(self, x):
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))

def build_model():
    return Net()

class Data(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(100 + i % 24)
        return torch.randn(6, generator=g), torch.randint(0, 5, (), generator=g)

def dataset():
    return Data()

def example_batch(n):
    return (torch.randn(n, 6),), torch.randint(0, 5, (n,))

def loss(output, target):
    return F.cross_entropy(output, target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=2.0, momentum=0.9)
"""

# A term of the whole batch that is zero for all trials, and in the first minibatches.
HINGE = """
def loss(output, target):
    return F.cross_entropy(output, target) + F.relu(output.mean(0) - 2.0).sum() * 5
"""

# What no watch of numbers sees, because it is no number.
ARRAY = """
FACTOR = np.ones(1)

def loss(output, target):
    return F.cross_entropy(output, target) * float(FACTOR[0])

def on_update(minibatch, loss, metrics):
    FACTOR[0] = 0.1
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "net.py"
    path.write_text(COMMON + text, encoding="utf-8")
    return path


def plan_of(path: Path, replicas: tuple[int, ...], microbatches: int) -> Plan:
    profile = structural_profile(path, SIZE).model_copy(update={"loss": LossMean(over="samples")})
    return make_plan(profile, replicas, "1f1b-flush", microbatches)


@pytest.mark.parametrize("replicas", [(1, 1), (2,)], ids=["microbatches", "replicas"])
def test_a_term_of_the_batch_that_begins_later(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    """Replicas see halves of what they have, where each has one microbatch."""
    path = written(tmp_path, HINGE)
    with pytest.raises(
        PlannerError, match=r"minibatch \d+: loss\(\) at .* together, and .* as the mean over"
    ) as error:
        train(path, plan_of(path, replicas, 2), steps=STEPS)
    assert "`microbatches=1`" in error.value.hint
    assert "`accept_divided_loss`" in error.value.hint


def test_ways_out_of_it(tmp_path: Path) -> None:
    """One microbatch trains as one process does; the other loss may be accepted."""
    path = written(tmp_path, HINGE)
    plan = plan_of(path, (1, 1), 1)
    (result, weights), (accepted, _) = eager.run_cases(
        [
            Case(path, plan, TrainingOptions(), STEPS),
            Case(path, plan_of(path, (1, 1), 2), TrainingOptions(accept_divided_loss=True), STEPS),
        ]
    )
    check_equal(path, result, weights)
    assert len(accepted.losses) == STEPS


def check_equal(path: Path, result: TrainResult, weights: Weights) -> None:
    spec = load_model_file(path)
    model = eager.build(spec)
    expected = eager.train(spec, model, eager.minibatches(spec, SIZE, 1)[:STEPS])
    assert [entry.loss for entry in result.losses] == expected
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[name], tensor), name


def test_a_loss_that_does_something_else_than_what_was_captured(tmp_path: Path) -> None:
    path = written(tmp_path, ARRAY)
    with pytest.raises(
        PlannerError, match=r"minibatch [1-3]: .* as it was captured .*: what it reads has changed"
    ):
        train(path, plan_of(path, (1, 1), 1), steps=4)


NUMBERS = {
    "a global of the loss": """
E = [0]
def loss(output, target):
    return F.cross_entropy(output, target) * (1.0 if E[0] < 3 else 0.1)
def on_update(minibatch, loss, metrics):
    E[0] += 1
""",
    "a global that a function of the model reads": """
SETTINGS = {"epoch": 0, "name": "a"}
def scaled(x):
    return x * (1 + SETTINGS["epoch"])
class Scaled(Net):
    def forward(self, x):
        return scaled(super().forward(x))
def build_model():
    return Scaled()
def on_update(minibatch, loss, metrics):
    SETTINGS["epoch"] = minibatch
""",
    "an attribute of the model's class, from the dataset": """
class Scaled(Net):
    def forward(self, x):
        return super().forward(x) * self.factor
def build_model():
    return Scaled()
class Annealing(Data):
    def __getitem__(self, i):
        Scaled.factor *= 0.5
        return super().__getitem__(i)
def dataset():
    return Annealing()
""",
    "an attribute of a model that a global holds": """
MODELS = []
class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.temperature = 1.0
    def forward(self, x):
        return super().forward(x) * self.temperature
def build_model():
    MODELS[:] = [Scaled()]
    return MODELS[0]
def on_update(minibatch, loss, metrics):
    MODELS[0].temperature *= 0.5
""",
    "blocks that exchange a number": """
SEEN = {}
class First(nn.Linear):
    def forward(self, x):
        SEEN["mean"] = float(x.mean())
        return super().forward(x)
class Last(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + SEEN.get("mean", 1.0))
def build_model():
    model = Net()
    model.a, model.d = First(6, 8), Last(8, 5)
    return model
def blocks(m):
    return [
        nn.Sequential(m.a, nn.Tanh()),
        nn.Sequential(m.b, nn.Tanh()),
        nn.Sequential(m.c, nn.Tanh()),
        m.d,
    ]
""",
}


@pytest.mark.parametrize("text", NUMBERS.values(), ids=NUMBERS)
def test_a_number_of_python_that_changes(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PlannerError, match="is another value than when the model was captured"):
        train(path, plan_of(path, (1, 1), 1), steps=4)


# The way out that the error names: with one microbatch a buffer counts minibatches, as in one
# process.
COUNTED = """
class Counting(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("updates", torch.zeros(()))
    def forward(self, x):
        output = super().forward(x), self.updates.clone()
        if self.training:
            self.updates += 1
        return output
def build_model():
    return Counting()
def loss(output, target):
    scores, updates = output
    return F.cross_entropy(scores, target) * torch.where(updates < 3, 1.0, 0.1)
HISTORY = []
def on_update(minibatch, loss, metrics):
    HISTORY.append(loss)
"""


def test_a_buffer_counts_in_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, COUNTED)
    ((result, weights),) = eager.run_cases(
        [Case(path, plan_of(path, (1, 1), 1), TrainingOptions(), STEPS)]
    )
    check_equal(path, result, weights)
    assert float(weights["updates"]) == STEPS


def test_a_buffer_that_counts_microbatches_is_refused(tmp_path: Path) -> None:
    """Also where a plan says nothing of it, as those of older profiles."""
    path = written(tmp_path, COUNTED)
    with pytest.raises(
        PlannerError, match="changes buffer 'updates' once for each microbatch"
    ) as error:
        train(path, plan_of(path, (1, 1), 2), steps=2)
    assert "`microbatches=1`" in error.value.hint


# PyTorch counts no such change, which libraries of codebooks make.
COUNTED_IN_DATA = (
    COUNTED.replace("self.updates += 1", "self.updates.data.add_(1)")
    + """
def blocks(model):
    return [model]
"""
)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [("1f1b", COUNTED), pytest.param("1f1b-flush", COUNTED_IN_DATA, marks=pytest.mark.slow)],
)
def test_a_buffer_that_counts_what_one_replica_sees_is_refused(
    tmp_path: Path, schedule: str, text: str
) -> None:
    path = written(tmp_path, text)
    plan = make_plan(structural_profile(path, SIZE), (2,), schedule, 1)
    with pytest.raises(
        PlannerError, match=r"'updates' in minibatch \d, and each worker of stage 0"
    ) as error:
        train(path, plan, steps=4)
    assert "no `replicas`" in error.value.hint
    assert train(path, plan, steps=4, accept_divided_loss=True).minibatches == 4


# What is the same however it is divided, and what calls a loss more than once does not see.
HARMLESS = """
def loss(output, target):
    noisy = F.dropout(output, 0.5)
    noisy.mul_(2.0)
    return F.cross_entropy(noisy, target)
"""
SCALAR = """
class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, x):
        hidden = self.a(x)
        return {
            "scores": super().forward(x),
            "hidden": hidden,
            "scale": self.scale,
            "name": "scaled",
        }
def build_model():
    return Scaled()
def loss(output, target):
    return F.cross_entropy(output["scores"] * output["scale"], target)
"""


@pytest.mark.parametrize(
    "text", [HARMLESS, SCALAR], ids=["a loss that draws", "a dictionary with a parameter"]
)
def test_no_false_alarm(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    assert len(train(path, plan_of(path, (1, 1), 2), steps=4).losses) == 4
