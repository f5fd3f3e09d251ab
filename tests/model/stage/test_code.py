"""Stages through torch.compile: the same to rounding, dropout and weight versions included.

Functions that generated code calls in place of captured operations: the same to the bit, forward
and backward.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import InputError
from planner.executor.stage.versions import WeightVersions
from planner.model.capture.capture import capture_file
from planner.model.options import PLAIN, ModuleOptions
from planner.model.spec import load_model_file
from planner.model.stage import code as compiling
from planner.model.stage.code import FUNCTIONS
from planner.model.stage.parts import COMPILED, Variant
from planner.model.stage.stage import StageModule, build_stage, warm_up
from planner.model.stage.weights import place_of
from tests.executor.models import write_model
from tests.model.splitting import cut_evenly, run_split

_aten = torch.ops.aten


def _x(*sizes: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(sizes).numel()).reshape(sizes).requires_grad_()


# Arguments of each, the fewest first: what is left out must have the same default.
ARGUMENTS: dict[Any, tuple[Callable[[], tuple[Any, ...]], ...]] = {
    _aten.add.Tensor: (lambda: (_x(3, 4), _x(4)), lambda: (_x(3, 4), 2), lambda: (_x(3), 1.5)),
    _aten.add_.Tensor: (lambda: (_x(3, 4) * 2, _x(4)), lambda: (torch.tensor(3), 1)),
    _aten.batch_norm.default: (
        lambda: (_x(4, 3), _x(3), _x(3), torch.zeros(3), torch.ones(3), True, 0.1, 1e-5, True),
    ),
    _aten.cat.default: (lambda: ([_x(2, 3), _x(1, 3)],), lambda: ([_x(2, 3), _x(2, 1)], 1)),
    _aten.conv2d.default: (
        lambda: (_x(2, 3, 5, 5), _x(4, 3, 3, 3)),
        lambda: (_x(2, 4, 5, 5), _x(4, 2, 3, 3), _x(4), [2, 2], [1, 1], [1, 1], 2),
    ),
    _aten.dropout.default: (lambda: (_x(5, 5), 0.5, True), lambda: (_x(5, 5), 0.5, False)),
    _aten.embedding.default: (
        lambda: (_x(5, 2), torch.tensor([[1, 4]])),
        lambda: (_x(5, 2), torch.tensor([1, 4]), 4, True, False),
    ),
    _aten.flatten.using_ints: (
        lambda: (_x(2, 3, 4),),
        lambda: (_x(2, 3, 4), 1),
        lambda: (_x(2, 3, 4, 2), 1, 2),
    ),
    _aten.gelu.default: (lambda: (_x(7),),),
    _aten.layer_norm.default: (
        lambda: (_x(3, 4), [4]),
        lambda: (_x(3, 4), [4], _x(4), _x(4), 1e-3, False),
    ),
    _aten.linear.default: (lambda: (_x(3, 4), _x(2, 4)), lambda: (_x(3, 4), _x(2, 4), _x(2))),
    _aten.matmul.default: (lambda: (_x(2, 3, 4), _x(4, 2)),),
    _aten.max_pool2d.default: (
        lambda: (_x(1, 2, 6, 6), [2, 2]),
        lambda: (_x(1, 2, 6, 6), [3, 3], [2, 2], [1, 1], [1, 1], True),
    ),
    _aten.mul.Tensor: (
        lambda: (_x(3, 4), _x(4)),
        lambda: (_x(3), 0.5),
        lambda: (torch.tensor([2, 3]), 2),
    ),
    _aten.permute.default: (lambda: (_x(2, 3, 4), [2, 0, 1]),),
    _aten.relu.default: (lambda: (_x(7),),),
    _aten.relu_.default: (lambda: (_x(7) * 2,),),
    _aten.reshape.default: (lambda: (_x(2, 6), [3, -1]),),
    _aten.scaled_dot_product_attention.default: (
        lambda: (_x(1, 2, 3, 4), _x(1, 2, 3, 4), _x(1, 2, 3, 4)),
        lambda: (_x(1, 2, 3, 4), _x(1, 2, 3, 4), _x(1, 2, 3, 4), None, 0.5, True),
    ),
    _aten.tanh.default: (lambda: (_x(7),),),
    _aten.transpose.int: (lambda: (_x(2, 3, 4), 0, -1),),
    _aten.unbind.int: (lambda: (_x(2, 3),), lambda: (_x(2, 3), 1)),
    _aten.unflatten.int: (lambda: (_x(2, 6), 1, [2, 3]),),
    _aten.unsqueeze.default: (lambda: (_x(2, 3), -1),),
    _aten.view.default: (lambda: (_x(2, 6), [3, 4]),),
}


def test_every_function_is_tried() -> None:
    assert set(ARGUMENTS) == set(FUNCTIONS)


@pytest.mark.parametrize("operation", ARGUMENTS, ids=str)
def test_functions_do_what_the_operations_do(operation: Any) -> None:
    for make in ARGUMENTS[operation]:
        expected, events = _run(operation, make())
        found, same = _run(FUNCTIONS[operation], make())
        assert same == events
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _run(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[list[Tensor], list[str]]:
    """Results and gradients, and the names of all operations under way, forward and backward."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own, in some versions
        with torch.autograd.profiler.profile() as profiler:
            made = call(*arguments)
            results = [made] if isinstance(made, Tensor) else list(made)
            total = sum((result * result).sum() for result in results)
            if isinstance(total, Tensor) and total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]
    flat = [
        each
        for argument in arguments
        for each in (argument if isinstance(argument, list) else [argument])
    ]
    gradients = [
        leaf.grad
        for leaf in flat
        if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.grad is not None
    ]
    return [*(result.detach() for result in results), *gradients], [
        event.name for event in profiler.function_events
    ]


def test_weights_are_looked_up_at_every_run() -> None:
    """Moving a module to a device replaces its buffers, and stages of one worker get parameters of
    their own.
    """
    weights = nn.Module()
    weights.add_module("0", nn.Linear(2, 2))
    weights.register_buffer("scale", torch.ones(1))
    weight, scale = place_of(weights, "0.weight"), place_of(weights, "scale")
    layer = weights.get_submodule("0")
    assert weight.registry[weight.name] is layer.weight
    layer._parameters["weight"] = nn.Parameter(torch.zeros(2, 2))
    weights.to(torch.float64)
    assert weight.registry[weight.name] is layer.weight
    assert scale.registry[scale.name] is weights.scale
    assert weights.scale.dtype == torch.float64


# The code generator's own imports and annotations are not ours to mend.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning"
)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("language", PLAIN),
        ("blocks", PLAIN),
        ("convolutional", ModuleOptions(channels_last=True)),
        ("convolutional", ModuleOptions(torch.bfloat16)),
    ],
)
@pytest.mark.slow
def test_compiled_stages(model: str, options: ModuleOptions, tmp_path: Path) -> None:
    file = load_model_file(write_model(tmp_path, model, "sgd"))
    torch.manual_seed(1)
    graph = capture_file(file, file.example_batch(4), options=options)
    batch = file.example_batch(4)
    cut = cut_evenly(graph, 2)
    plain, compiled = (
        run_split(graph, batch, cut, (1, 2, 0), compile_=compile_) for compile_ in (False, True)
    )
    rtol, atol = (0.1, 0.02) if options.autocast else (1e-4, 1e-5)
    assert torch.allclose(compiled.loss, plain.loss, rtol=rtol, atol=atol)
    for mine, theirs in ((compiled.gradients, plain.gradients), (compiled.buffers, plain.buffers)):
        for name, tensor in theirs.items():
            assert isinstance(tensor, Tensor)
            other = mine[name]
            assert isinstance(other, Tensor)
            assert torch.allclose(other.float(), tensor.float(), rtol=rtol, atol=atol), name


def _stashing(stage: StageModule, batches: list[tuple[Tensor, Tensor]], depth: int) -> list[Tensor]:
    """Losses, and weights at the end, of 1F1B with `depth` minibatches in flight, momentum, and
    updates in place.
    """
    from planner.model.batch import Batch

    versions = WeightVersions(list(stage.parameters()))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    in_flight: list[tuple[int, Tensor]] = []
    losses = []
    for number, (images, classes) in enumerate([*batches, *batches[:depth]]):
        if number < len(batches):
            versions.stash(number)
            stage.set_random_key(0, number, 0)
            loss = stage(Batch((images,), {}, classes), {})["loss"]
            losses.append(loss.detach().clone())
            in_flight.append((number, loss))
        if number + 1 >= depth and in_flight:
            done, loss = in_flight.pop(0)
            with versions.restored(done):
                loss.backward()  # type: ignore[no-untyped-call]
            versions.update(optimizer.step)
            for parameter in stage.parameters():
                parameter.grad = None
    assert versions.most_versions == depth
    return [*losses, *(parameter.detach().clone() for parameter in stage.parameters())]


@pytest.mark.slow
def test_weight_versions_under_compiled_code(tmp_path: Path) -> None:
    """Its backward sees the weights of its forward, although updates in between changed what
    parameters hold.
    """
    file = load_model_file(write_model(tmp_path, "convolutional", "sgd"))
    torch.manual_seed(1)
    batches = [(b.args[0], b.target) for b in (file.example_batch(4) for _ in range(6))]

    def run(compile_: bool) -> list[Tensor]:
        torch.manual_seed(1)
        graph = capture_file(file, file.example_batch(4))
        stage = build_stage(
            graph, [layer.name for layer in graph.layers], variant=Variant(compiled=compile_)
        )
        return _stashing(stage, batches, depth=3)

    plain, compiled = run(False), run(True)
    assert all(
        torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(compiled, plain, strict=True)
    )
    # Updates matter at this learning rate: other weights in the backward would show.
    assert not torch.allclose(plain[0], plain[5], rtol=1e-2)


@pytest.mark.slow
def test_the_same_code_serves_every_version(tmp_path: Path) -> None:
    """New storage behind a parameter is no reason to compile again."""
    file = load_model_file(write_model(tmp_path, "language", "sgd"))
    graph = capture_file(file, file.example_batch(4))
    stage = build_stage(graph, [layer.name for layer in graph.layers], variant=COMPILED)
    batch = file.example_batch(4)
    stage(batch, {})["loss"].backward()
    counts: Counter[str] = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    for _ in range(3):
        for parameter in stage.parameters():
            parameter.data = parameter.data.clone()
        stage(batch, {})["loss"].backward()
    assert counts["unique_graphs"] == before


@pytest.mark.parametrize("model", ["convolutional", "language", "blocks"])
def test_a_rehearsal_leaves_no_trace(model: str, tmp_path: Path) -> None:
    file = load_model_file(write_model(tmp_path, model, "sgd"))
    graph = capture_file(file, file.example_batch(4))
    batch = file.example_batch(4)
    stages = [build_stage(graph, names) for names in cut_evenly(graph, 3)]
    before = {name: tensor.clone() for name, tensor in graph.model.state_dict().items()}
    generator = torch.get_rng_state()
    for stage in stages:
        warm_up(stage, batch)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in graph.model.state_dict().items()
    )
    assert all(parameter.grad is None for parameter in graph.model.parameters())


def test_a_machine_that_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_code: object) -> object:
        raise RuntimeError("No working C++ compiler found\nand much more")

    compiling.check_compiler.cache_clear()
    monkeypatch.setattr(compiling, "compiled", broken)
    with pytest.raises(
        InputError, match="does not work for cpu on this machine: No working C"
    ) as error:
        compiling.check_compiler("cpu")
    assert "g++" in error.value.hint
    compiling.check_compiler.cache_clear()
