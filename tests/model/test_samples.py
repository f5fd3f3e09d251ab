"""Example batches whose samples are not the first dimension, or not only there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import planner
from planner.errors import ModelFileError
from planner.model.batch import Batch
from planner.model.capture.capture import capture_file
from planner.model.stage.stage import build_stage

TOKENS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(TOKENS, TOKENS)

    def forward(self, x: Any, *_: Any) -> Tensor:
        result: Tensor = self.words(x if isinstance(x, Tensor) else torch.stack(x))
        return result


def loss(output: Tensor, target: Any) -> Tensor:
    return output.mean()


def time_first(n: int) -> Any:
    return (torch.randn(TOKENS, n),), None


def ragged(n: int) -> Any:
    return (torch.randn(n, TOKENS),), [{"boxes": torch.rand(1 + i % 3, 4)} for i in range(n)]


def listed(n: int) -> Any:
    return ([torch.randn(TOKENS) for _ in range(n)],), None


def named(n: int) -> Any:
    return (torch.randn(n, TOKENS), ["a.png"] * n), None


def counted(n: int) -> Any:
    return (torch.randn(n, TOKENS), n), None


@pytest.mark.parametrize("size", [4, TOKENS])
@pytest.mark.parametrize(
    ("example_batch", "what", "way"),
    [
        (time_first, "a tensor of shape", "x.transpose(0, 1) at the start of forward"),
        (ragged, "a list with one element for each sample", "pad the samples to one shape"),
        (listed, "a list with one element for each sample", "pad the samples to one shape"),
        (named, "another structure for", "pad the samples to one shape"),
        (counted, "what is no tensor becomes part of the captured model", "leave it out"),
    ],
)
def test_samples_elsewhere_than_in_the_first_dimension(
    example_batch: Any, what: str, way: str, size: int
) -> None:
    spec = planner.in_memory(Net(), example_batch=example_batch, loss=loss)

    with pytest.raises(ModelFileError) as refused:
        capture_file(spec, spec.example_batch(size))

    assert what in refused.value.message
    assert way in refused.value.hint


def test_the_ways_out_work() -> None:
    class TimeInside(Net):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return super().forward(x.transpose(0, 1).transpose(0, 1))

    def padded(n: int) -> Any:
        return (torch.randn(n, TOKENS),), {
            "boxes": torch.rand(n, 3, 4),
            "valid": torch.rand(n, 3) > 0.5,
        }

    spec = planner.in_memory(TimeInside(), example_batch=padded, loss=loss)

    assert capture_file(spec, spec.example_batch(TOKENS)).batch_size is None


def test_comparing_sizes_draws_no_random_numbers() -> None:
    spec = planner.in_memory(
        Net(), example_batch=lambda n: ((torch.randn(n, TOKENS),), None), loss=loss
    )
    batch = spec.example_batch(4)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)

    capture_file(spec, batch)

    assert torch.equal(torch.rand(1), expected)


def test_another_number_than_the_captured_one_is_refused() -> None:
    class Scaled(Net):
        def forward(self, x: Any, scale: Any) -> Tensor:
            scaled: Tensor = super().forward(x) * scale
            return scaled

    spec = planner.in_memory(
        Scaled(), example_batch=lambda n: ((torch.randn(n, TOKENS), 2.0), None), loss=loss
    )
    graph = capture_file(spec, spec.example_batch(4))
    stage = build_stage(graph, [layer.name for layer in graph.layers])
    rows = torch.randn(4, TOKENS)
    expected = (spec.build_model()(rows, 2.0)).mean()

    assert torch.equal(stage(Batch((rows, 2.0)), {})["loss"], expected)
    for other in (3.0, torch.full((4,), 2.0)):
        with pytest.raises(ModelFileError, match="what is no tensor is part of the captured model"):
            stage(Batch((rows, other)), {})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(TOKENS), torch.ones(TOKENS))] * 4)


class StreamOfKnownLength(Stream):
    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("dataset", "way"),
    [
        (Stream(), "planner.pipeline: docs/guides/own-loop.md"),
        (StreamOfKnownLength(), "planner.pipeline: docs/guides/own-loop.md"),
        (DataLoader(TensorDataset(torch.ones(4, TOKENS))), "return the loader's dataset"),
        (3, "docs/guides/own-model.md says"),
    ],
)
def test_data_that_have_no_items_by_number(dataset: Any, way: str) -> None:
    spec = planner.in_memory(Net(), example_batch=time_first, loss=loss, dataset=dataset)

    with pytest.raises(ModelFileError, match="not something with a length and items") as refused:
        spec.dataset()

    assert way in refused.value.hint
