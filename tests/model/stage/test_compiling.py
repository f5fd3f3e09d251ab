"""Stages through torch.compile: the same to rounding, dropout and weight versions included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from planner.errors import InputError
from planner.executor.stage.versions import WeightVersions
from planner.model.load import capture_file
from planner.model.options import PLAIN, ModuleOptions
from planner.model.spec import load_model_file
from planner.model.stage import compiling
from planner.model.stage.parts import COMPILED, Variant
from planner.model.stage.stage import StageModule, build_stage
from planner.model.stage.warmup import warm_up
from tests.executor.models import write_model
from tests.model.splitting import cut_evenly, run_split

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
    plain, compiled = (run_split(graph, batch, cut, (1, 2, 0), compile_=compile_) for compile_ in (False, True))
    rtol, atol = (0.1, 0.02) if options.autocast else (1e-4, 1e-5)
    assert torch.allclose(compiled.loss, plain.loss, rtol=rtol, atol=atol)
    for mine, theirs in ((compiled.gradients, plain.gradients), (compiled.buffers, plain.buffers)):
        for name, tensor in theirs.items():
            assert isinstance(tensor, Tensor)
            other = mine[name]
            assert isinstance(other, Tensor)
            assert torch.allclose(other.float(), tensor.float(), rtol=rtol, atol=atol), name


def _stashing(stage: StageModule, batches: list[tuple[Tensor, Tensor]], depth: int) -> list[Tensor]:
    """Losses, and weights at the end, of 1F1B with `depth` minibatches in flight, momentum, and updates in place."""
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


def test_weight_versions_under_compiled_code(tmp_path: Path) -> None:
    """Its backward sees the weights of its forward, although updates in between changed what parameters hold."""
    file = load_model_file(write_model(tmp_path, "convolutional", "sgd"))
    torch.manual_seed(1)
    batches = [(b.args[0], b.target) for b in (file.example_batch(4) for _ in range(6))]

    def run(compile_: bool) -> list[Tensor]:
        torch.manual_seed(1)
        graph = capture_file(file, file.example_batch(4))
        stage = build_stage(graph, [layer.name for layer in graph.layers], variant=Variant(compiled=compile_))
        return _stashing(stage, batches, depth=3)

    plain, compiled = run(False), run(True)
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(compiled, plain, strict=True))
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
    assert all(torch.equal(tensor, before[name]) for name, tensor in graph.model.state_dict().items())
    assert all(parameter.grad is None for parameter in graph.model.parameters())


def test_a_machine_that_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_code: object) -> object:
        raise RuntimeError("No working C++ compiler found\nand much more")

    compiling.check_compiler.cache_clear()
    monkeypatch.setattr(compiling, "compiled", broken)
    with pytest.raises(InputError, match="does not work for cpu on this machine: No working C") as error:
        compiling.check_compiler("cpu")
    assert "g++" in error.value.hint
    compiling.check_compiler.cache_clear()
