"""The last minibatch of an epoch is trained on the remaining samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.errors import InputError, ModelFileError, PlannerError
from planner.executor.run.data import DatasetBatches, FedBatches
from planner.executor.run.stages import check_sizes
from planner.model.capture.capture import capture_file
from planner.model.capture.other_sizes import OtherSizes
from planner.model.spec import load_model_file
from planner.model.stage.stage import build_stage
from planner.options.training import TrainingOptions
from planner.schedule.instructions import Unit
from tests.executor import eager
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.reference import delayed_updates
from tests.executor.run.test_data import Numbers, samples

pytestmark = pytest.mark.usefixtures("warm_start")


def test_an_epoch_ends_with_what_is_left() -> None:
    data = DatasetBatches(Numbers(23), microbatch_size=5, microbatches=1, seed=1)
    assert data.minibatches_per_epoch == 5
    epochs = [
        [n for m in range(5) for n in samples(data.batch(Unit(5 * epoch + m)))]
        for epoch in range(2)
    ]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert [data.minibatch_size(m) for m in range(6)] == [5, 5, 5, 5, 3, 5]


def test_what_is_left_is_divided_evenly_and_some_microbatches_may_be_empty() -> None:
    data = DatasetBatches(Numbers(31), microbatch_size=4, microbatches=3, seed=1)
    assert [data.size(Unit(2, m)) for m in range(3)] == [3, 2, 2]
    assert data.last_sizes == (3, 2, 2)
    data = DatasetBatches(Numbers(26), microbatch_size=4, microbatches=3, seed=1)
    assert [data.size(Unit(2, m)) for m in range(3)] == [1, 1, 0]
    whole = DatasetBatches(Numbers(26), microbatch_size=12, microbatches=1, seed=1)
    parts = [n for m in range(2) for n in samples(data.batch(Unit(2, m)))]
    assert parts == samples(whole.batch(Unit(2)))


@pytest.mark.parametrize(
    ("schedule", "microbatches", "replicas", "count"),
    [
        pytest.param("1f1b-flush", 3, (2, 1), 31, id="three, two and two samples"),
        pytest.param("gpipe", 3, (1, 2), 26, id="one, one and none", marks=pytest.mark.slow),
    ],
)
def test_synchronous_schedules_average_over_the_samples_there_are(
    schedule: str, microbatches: int, replicas: tuple[int, ...], count: int, tmp_path: Path
) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=count)
    plan = make_plan(structural_profile(path, 4), replicas, schedule, microbatches)
    result, weights = eager.run_one(path, plan, TrainingOptions(), epochs=2)
    spec = load_model_file(path)
    model = eager.build(spec)
    losses = eager.train(spec, model, eager.minibatches(spec, 4 * microbatches, 2))
    assert result.samples == 2 * count
    assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-4)
    eager.assert_close(weights, model)


def test_asynchronous_1f1b_gives_each_minibatch_of_a_round_the_same_weight(tmp_path: Path) -> None:
    """Equal to the bit. As in DistributedDataParallel, a round averages means, whatever their
    numbers of samples.
    """
    path = write_model(tmp_path, "language", "momentum", samples=19)
    profile = structural_profile(path, 4)
    plan = make_plan(profile, (2, 1))
    result, weights = eager.run_one(path, plan, TrainingOptions(), epochs=2)
    spec = load_model_file(path)
    model = eager.build(spec)
    batches = eager.minibatches(spec, 4, 2)
    names = eager.stage_names(profile, plan)

    def forward_loss(model: nn.Module, minibatch: int) -> Tensor:
        return eager.loss_of(spec, model, batches[minibatch])

    losses, expected = delayed_updates(
        model, names, (2, 1), spec.optimizer, forward_loss, len(batches)
    )
    assert len(batches) == 10
    assert [entry.loss for entry in result.losses] == losses
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


def test_dropping_the_last_is_still_possible() -> None:
    data = DatasetBatches(Numbers(19), 4, 1, seed=0, drop_last=True)
    assert data.minibatches(None, 2) == 8
    assert data.last_sizes == ()
    with pytest.raises(ModelFileError, match="fewer than one minibatch of 32"):
        DatasetBatches(Numbers(19), 32, 1, seed=0, drop_last=True)
    assert DatasetBatches(Numbers(19), 32, 1, seed=0).minibatches(None, 2) == 2


class Normed(nn.Module):
    """BatchNorm sees the samples only, no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.first(x))
        return result


NORMED = """
import torch
from tests.executor.run.test_last_batches import Normed as build_model

def example_batch(batch_size):
    return torch.randn(batch_size, 3), torch.randn(batch_size, 4)

def loss(output, target):
    return torch.nn.functional.mse_loss(output, target)
"""


def test_batch_norm_of_one_sample_is_refused_before_training(tmp_path: Path) -> None:
    path = tmp_path / "normed.py"
    path.write_text(NORMED, encoding="utf-8")
    spec = load_model_file(path)
    graph = capture_file(spec, spec.example_batch(4))
    stage = build_stage(graph, [layer.name for layer in graph.layers])
    other = OtherSizes(graph, spec.loss, spec.example_batch(4))
    check_sizes([stage], [3, 2, 0], other, spec)
    with pytest.raises(ModelFileError, match="microbatches of 1 sample: BatchNorm cannot"):
        check_sizes([stage], [2, 1], other, spec)


SQUEEZED = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

def example_batch(batch_size):
    return torch.randn(batch_size, 3), torch.rand(batch_size)

def loss(output, target):
    return nn.functional.binary_cross_entropy_with_logits(output.squeeze(), target)

def dataset():
    rows = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(19, 3, generator=rows), torch.rand(19, generator=rows)
    )
"""


@pytest.fixture
def squeezed(tmp_path: Path) -> Path:
    """A model file whose loss fails for one sample, and an epoch that ends with microbatches of two
    and one.
    """
    path = tmp_path / "squeezed.py"
    path.write_text(SQUEEZED, encoding="utf-8")
    return path


def test_a_profile_does_not_need_parts_of_one_sample(squeezed: Path) -> None:
    made = planner.profile(squeezed, batch_size=4, seconds=0.0, repeats=1)

    assert made.loss is not None
    assert made.loss.over == "samples"


def test_a_tail_that_the_model_fails_on_is_refused_before_the_first_step(squeezed: Path) -> None:
    plan = make_plan(structural_profile(squeezed, 4), (1, 1), "1f1b-flush", 2)

    with pytest.raises(PlannerError) as refused:
        planner.train(squeezed, plan, epochs=1)

    assert (
        "microbatches of 1 sample: the model fails on it: ValueError: Target size"
        in refused.value.message
    )
    assert "`drop_last`" in refused.value.hint
    trained = planner.train(squeezed, plan, epochs=1, drop_last=True)
    assert trained.minibatches == 2


def test_an_own_loop_refuses_such_a_minibatch_when_it_is_given(squeezed: Path) -> None:
    spec = load_model_file(squeezed)
    usual = spec.example_batch(4)
    fed = FedBatches(2, 4)
    fed.check_sizes_by(OtherSizes(capture_file(spec, usual), spec.loss, usual))
    for size in (8, 6, 4):
        fed.feed(spec.example_batch(size))

    with pytest.raises(
        InputError, match="a minibatch of 3 samples has microbatches of 1 sample: the model fails"
    ):
        fed.feed(spec.example_batch(3))
    assert fed.count == 3


IN_PLACE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x += 1
        return self.last(torch.tanh(self.first(x.mul_(0.5)))) + x

MODEL = Net()  # made while the file is imported

def build_model():
    return MODEL

def example_batch(batch_size):
    return torch.randn(batch_size, 3), torch.randn(batch_size, 3)

def loss(output, target):
    target.clamp_(-1, 1)
    return nn.functional.mse_loss(output, target)

def dataset():
    rows = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(16, 3, generator=rows), torch.randn(16, 3, generator=rows)
    )
"""


def test_inputs_changed_in_place_and_a_model_made_at_import(tmp_path: Path) -> None:
    path = tmp_path / "in_place.py"
    path.write_text(IN_PLACE, encoding="utf-8")
    # which compares two calls on one batch
    planner.profile(path, batch_size=4, seconds=0.0, repeats=1)
    plan = make_plan(structural_profile(path, 4), (1, 1), "1f1b-flush", 1)

    result, weights = eager.run_one(path, plan, TrainingOptions(), epochs=2)

    spec = load_model_file(path)  # imported anew: its model is as it was
    model = eager.build(spec)
    losses = eager.train(spec, model, eager.minibatches(spec, 4, 2))
    assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-5)
    eager.assert_close(weights, model)
