"""Divided minibatches train as whole ones, or are refused, whatever labels only the data have and a
plan says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.api.running import train
from planner.errors import PlannerError
from planner.formats.plan import Plan
from planner.formats.profile import ForbiddenLabel, LossMean
from planner.model.batch import Batch
from planner.model.loss import check_labels
from planner.model.spec import TrainingSpec, load_model_file
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from tests.executor.plans import make_plan

pytestmark = pytest.mark.usefixtures("warm_start")
MICROBATCHES, EACH, STEPS = 4, 4, 4

# A head that begins at zero gives all labels the same loss, and the example batch has no padding.
ZERO_HEAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.words(tokens))))

def build_model():
    return Net()

def example_batch(size):
    tokens = torch.randint(0, 11, (size, 6))
    return (tokens,), tokens

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[1 + index % 6:] = -100
        return (tokens,), labels
"""

# One label per sample, of which a third is ignored.
ONE_LABEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

def example_batch(size):
    return (torch.randn(size, 8),), torch.randint(0, 4, (size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return (x,), torch.tensor(-100 if index % 3 == 0 else int(x[0] > 0))
"""

# As nanoGPT: the model computes the loss, of an argument whose name says nothing, and -1 is no
# target.
INSIDE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, idx, targets):
        logits = self.head(torch.tanh(self.words(idx)))
        return logits, nn.functional.cross_entropy(
            logits.view(-1, 11), targets.view(-1), ignore_index=-1
        )

def build_model():
    return Net()

def example_batch(size):
    return (torch.randint(0, 11, (size, 6)), torch.randint(0, 11, (size, 6))), None

def loss(output, target):
    return output[1]

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(index))
        labels = tokens.roll(-1)
        labels[1 + index % 6:] = -1
        return (tokens, labels), None
"""

COMMON = """
def dataset():
    return Rows()

def sampler(microbatch_size, microbatches, seed):
    return torch.utils.data.SequentialSampler(range(64))

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "net.py"
    path.write_text(text + COMMON, encoding="utf-8")
    return path


def plan_of(path: Path, loss: LossMean | str | None = "profiled") -> Plan:
    profile = profile_model(
        load_model_file(path), EACH, ProfilingOptions(device="cpu", seconds=0.0, repeats=1)
    )
    if not isinstance(loss, str):
        profile = profile.model_copy(update={"loss": loss})
    return make_plan(profile, (1, 1), "gpipe", MICROBATCHES)


def one_process(spec: TrainingSpec) -> list[float]:
    torch.manual_seed(0)
    model = spec.build_model()
    optimizer, dataset = spec.optimizer(list(model.parameters())), spec.dataset()
    assert spec.loss is not None
    assert dataset is not None
    losses, size = [], EACH * MICROBATCHES
    for step in range(STEPS):
        batch = spec.collate([dataset[index] for index in range(step * size, (step + 1) * size)])
        optimizer.zero_grad()
        loss = spec.loss(model(*batch.args), batch.target)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    "text",
    [ZERO_HEAD, pytest.param(ONE_LABEL, marks=pytest.mark.slow), INSIDE],
    ids=["zero head", "one label", "inside the model"],
)
def test_what_only_the_data_have_counts(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    losses = [each.loss for each in train(path, plan_of(path), steps=STEPS).losses]
    assert losses == pytest.approx(one_process(load_model_file(path)), rel=1e-5)


@pytest.mark.parametrize(
    "stated",
    [
        LossMean(over="sum"),
        pytest.param(LossMean(over="samples"), marks=pytest.mark.slow),
        pytest.param(None, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_what_the_model_contradicts_is_refused(tmp_path: Path, stated: LossMean | None) -> None:
    """A plan's file may have been edited, and one of an estimate says nothing."""
    path = written(tmp_path, ZERO_HEAD)
    with pytest.raises(
        PlannerError, match="the losses of the parts of a batch, weighted so, do not add up"
    ) as error:
        train(path, plan_of(path, stated), steps=STEPS)
    assert "loss_weight(target)" in error.value.hint


def test_a_user_may_accept_another_loss(tmp_path: Path) -> None:
    path = written(tmp_path, ZERO_HEAD)
    result = train(path, plan_of(path, None), steps=2, accept_divided_loss=True)
    assert len(result.losses) == 2


def test_a_label_that_comes_late_is_refused(tmp_path: Path) -> None:
    """No trial could have it: the example has none, nor has what a start reads of the dataset."""
    path = written(tmp_path, ONE_LABEL.replace("index % 3 == 0", "index == 18"))
    plan = plan_of(path)
    assert plan.loss == LossMean(over="samples", forbidden=(ForbiddenLabel(leaf=1, value=-100),))
    with pytest.raises(PlannerError, match="the target has the value -100, with which the loss of"):
        train(path, plan, steps=STEPS)


def test_labels_are_refused_wherever_they_come_from() -> None:
    mean = LossMean(over="samples", forbidden=(ForbiddenLabel(leaf=1, value=-100),))
    legal = Batch((torch.zeros(3, 8),), {}, torch.tensor([0, 1, 2]))
    check_labels(legal, mean, "net.py")
    ignored = Batch((torch.zeros(3, 8),), {}, torch.tensor([0, -100, 2]))
    with pytest.raises(PlannerError, match="the target has the value -100"):
        check_labels(ignored, mean, "net.py")
