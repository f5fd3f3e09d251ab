"""Groups of layers that recompute change nothing to the bit, and free what they do not keep."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import CaptureError
from planner.executor.stage.versions import WeightVersions
from planner.model.batch import Batch
from planner.model.capture.capture import capture, capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.options import PLAIN, ModuleOptions
from planner.model.spec import load_model_file
from planner.model.stage.parts import Variant
from planner.model.stage.stage import StageModule, build_stage, warm_up
from planner.profiler.step.allocation import meter_for
from tests.executor.models import write_model
from tests.model.device_models import DEVICE_MODELS
from tests.model.models import CASES

MODELS = CASES | DEVICE_MODELS
DEPTH = 3  # units in flight
Groups = tuple[tuple[str, ...], ...]


def _parts(names: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    bounds = [round(k * len(names) / parts) for k in range(parts + 1)]
    return [tuple(names[a:b]) for a, b in pairwise(bounds) if b > a]


CHOICES: dict[str, Callable[[Sequence[str]], Groups]] = {
    "whole": lambda names: (tuple(names),),
    "first half": lambda names: tuple(_parts(names, 2)[:1]),
    "every third": lambda names: tuple(_parts(names, 9)[::3]),
    "all, by five": lambda names: tuple(_parts(names, 5)),
    "each layer": lambda names: tuple((name,) for name in names),
}


@cache
def _graph(case: str) -> LayerGraph:
    torch.manual_seed(1)
    return capture(MODELS[case].build(), MODELS[case].batch(4), MODELS[case].loss)


def _train(stage: StageModule, batches: Sequence[Batch]) -> list[Tensor]:
    """Losses, then weights and buffers, of 1F1B with several units and weight versions in flight;
    then restore both.
    """
    state = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
    parameters = list(stage.parameters())
    versions = WeightVersions(parameters)
    optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05, momentum=0.9)
    in_flight: deque[tuple[int, Tensor]] = deque()
    losses = []
    for number, batch in enumerate([*batches, *batches[: DEPTH - 1]]):
        if number < len(batches):
            versions.stash(number)
            stage.set_random_key(7, number, 0)
            with versions.stashed(number):
                loss = stage(batch, {})["loss"]
            losses.append(loss.detach().clone())
            in_flight.append((number, loss))
        if number + 1 >= DEPTH:
            done, loss = in_flight.popleft()
            with versions.restored(done):
                loss.backward()  # type: ignore[no-untyped-call]
            del loss
            versions.update(optimizer.step)
            optimizer.zero_grad()
    assert not in_flight
    found = [*losses, *(tensor.clone() for tensor in stage.state_dict().values())]
    with torch.no_grad():
        for name, tensor in stage.state_dict().items():
            tensor.copy_(state[name])
    return found


def _assert_equal(graph: LayerGraph, batches: Sequence[Batch], groups: Groups) -> None:
    names = [layer.name for layer in graph.layers]
    torch.manual_seed(5)
    plain = _train(build_stage(graph, names), batches)
    torch.manual_seed(6)  # must not matter
    again = _train(build_stage(graph, names, variant=Variant(recompute=groups)), batches)
    assert len(plain) == len(again)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "choice",
    [
        "every third",
        *(pytest.param(each, marks=pytest.mark.slow) for each in CHOICES if each != "every third"),
    ],
)
@pytest.mark.parametrize("case", MODELS)
def test_equal_to_the_bit(case: str, choice: str) -> None:
    """With weights that change while units are in flight, dropout, BatchNorm, recurrent layers and
    nested graphs.
    """
    graph = _graph(case)
    torch.manual_seed(2)
    batches = [MODELS[case].batch(4) for _ in range(5)]
    _assert_equal(graph, batches, CHOICES[choice]([layer.name for layer in graph.layers]))


@pytest.mark.parametrize("choice", ["whole", "each layer"])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("convolutional", ModuleOptions(torch.bfloat16)),
        ("convolutional", ModuleOptions(channels_last=True)),
        ("language", ModuleOptions(torch.bfloat16)),
        ("tied", PLAIN),
        ("blocks", PLAIN),
        ("blocks", ModuleOptions(torch.bfloat16)),
    ],
)
def test_equal_in_other_precisions_layouts_and_in_blocks(
    model: str, options: ModuleOptions, choice: str, tmp_path: Path
) -> None:
    spec = load_model_file(write_model(tmp_path, model, "sgd"))
    torch.manual_seed(1)
    graph = capture_file(spec, spec.example_batch(4), options=options)
    batches = [spec.example_batch(4) for _ in range(5)]
    groups = CHOICES[choice]([layer.name for layer in graph.layers])
    _assert_equal(graph, batches, groups)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning"
)
@pytest.mark.parametrize("model", ["convolutional", "language", "blocks"])
def test_compiled_groups(model: str, tmp_path: Path) -> None:
    """To rounding: code that is compiled in other pieces is fused otherwise."""
    spec = load_model_file(write_model(tmp_path, model, "sgd"))
    torch.manual_seed(1)
    graph = capture_file(spec, spec.example_batch(4))
    batches = [spec.example_batch(4) for _ in range(5)]
    names = [layer.name for layer in graph.layers]
    plain = _train(build_stage(graph, names), batches)
    for choice in ("whole", "every third"):
        stage = build_stage(
            graph, names, variant=Variant(compiled=True, recompute=CHOICES[choice](names))
        )
        warm_up(stage, batches[0])
        for one, other in zip(plain, _train(stage, batches), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    torch._dynamo.reset()


class _Average(nn.Module):
    """Scales by an average that it keeps itself; zeros leave it as it is."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("average", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with torch.no_grad():
            self.average += 0.1 * x.abs().mean(0) * (x.abs().sum() > 0)
        result: Tensor = x * self.average.clone()
        return result


@pytest.mark.parametrize("warm", [False, True])
def test_a_second_forward_reads_the_buffers_of_the_first(warm: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Average(), nn.Tanh(), _Average(), nn.Linear(6, 4))
    batch = Batch((torch.randn(4, 6),), {}, torch.randint(0, 4, (4,)))
    graph = capture(model, batch, F.cross_entropy)
    names = [layer.name for layer in graph.layers]
    batches = [Batch((torch.randn(4, 6),), {}, batch.target) for _ in range(5)]
    stages = [
        build_stage(graph, names, variant=Variant(recompute=groups))
        for groups in ((), ((names[0],), (names[2],)))
    ]
    if warm:
        for stage in stages:
            warm_up(stage, Batch((torch.zeros(4, 6),), {}, batch.target))
    plain, again = (_train(stage, batches) for stage in stages)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    average = stages[0].get_buffer("0.average")
    assert not any(torch.equal(average, tensor) for tensor in plain)


def test_groups_that_make_no_sense() -> None:
    graph = _graph("vgg")
    names = [layer.name for layer in graph.layers]
    for groups, words in (
        (((names[0], names[2]),), "do not follow one another"),
        (((names[0], names[-1]),), "do not follow one another"),
        (((names[0], names[1]), (names[1],)), "in two groups"),
    ):
        with pytest.raises(CaptureError, match=words):
            build_stage(graph, names[:-1], variant=Variant(recompute=groups))


WIDTH, ROWS, BLOCKS = 64, 256, 6
VALUE_BYTES = ROWS * WIDTH * 4


@cache
def _measured(groups: str) -> tuple[int, int]:
    """Values that a forward keeps, and the most that exist at once in its backward."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Sigmoid())
        for _ in range(BLOCKS)
    ]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), *blocks)
    batch = Batch((torch.randn(ROWS, WIDTH),), {}, torch.randn(ROWS, WIDTH))
    graph = capture(model, batch, F.mse_loss)
    names = [layer.name for layer in graph.layers]
    units = [
        tuple(name for name in names if name.startswith(f"{block}."))
        for block in range(1, BLOCKS + 1)
    ]
    chosen = {
        "none": (),
        "first three": units[:3],
        "last three": units[3:],
        "all": units,
        "whole": [tuple(names)],
    }
    stage = build_stage(graph, names, variant=Variant(recompute=tuple(chosen[groups])))
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stage(batch, {})["loss"].backward()
    meter = meter_for(torch.device("cpu"))
    with meter:
        meter.mark()
        loss = stage(batch, {})["loss"]
        meter.mark()
        meter.mark()  # its peak is what is there at the beginning
        loss.backward()
        meter.mark()
    _, _, kept, most = meter.peaks()
    return round(kept / VALUE_BYTES), round(most / VALUE_BYTES)


def test_memory_is_freed() -> None:
    """Each block saves the value that enters it and the result of tanh; sigmoid's result enters the
    next block.
    """
    kept, most = _measured("none")
    assert _measured("first three")[0] == _measured("last three")[0] == kept - 3
    assert _measured("all")[0] == kept - BLOCKS
    assert _measured("whole")[0] == kept - 1 - 2 * BLOCKS  # its input is the batch
    # One group's activations exist at a time, when those of later layers are freed.
    assert _measured("first three")[1] == most - 3
    assert _measured("all")[1] < most - 3
    assert _measured("whole")[1] == most
