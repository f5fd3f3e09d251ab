"""A stage holds its own weights under their names, and checks what it is given.

Stages that hand everything to their neighbour compute what the unsplit model computes, gradients
included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import CaptureError, ModelFileError
from planner.model.batch import Batch, collate
from planner.model.capture.capture import capture, capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.spec import load_model_file
from planner.model.stage.evaluation import share_buffers
from planner.model.stage.parts import OBSERVABLE
from planner.model.stage.stage import build_stage
from tests.executor.models import write_model
from tests.model.chained import ChainedStage, cut_values
from tests.model.models import CASES
from tests.model.splitting import cut_evenly

BATCH_SIZE = 3


def pipelined(graph: LayerGraph, stages: list[Any], received: tuple[Tensor, ...] = ()) -> Tensor:
    """Run the stages with a wire between them, as another system would, and their backwards; the
    loss.
    """
    stage, *later = stages
    output = stage(*received)
    if not later:
        (loss,) = output
        loss.backward()
        assert isinstance(loss, Tensor)
        return loss.detach()
    assert [tuple(t.shape) for t in output] == [tuple(t.shape) for t in stage.output_args]
    assert [t.requires_grad for t in output] == [t.requires_grad for t in later[0].input_args]
    assert all(tensor.is_contiguous() for tensor in output)
    wires = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in output)
    loss = pipelined(graph, later, wires)
    with_gradient = [
        (t, wire.grad) for t, wire in zip(output, wires, strict=True) if t.requires_grad
    ]
    torch.autograd.backward(
        [t for t, _ in with_gradient], [gradient for _, gradient in with_gradient]
    )
    return loss


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", ["language", "convolutional", "blocks"])
def test_equal_to_the_unsplit_model(model: str, recompute: bool, tmp_path: Path) -> None:
    spec = load_model_file(str(write_model(tmp_path, model, "sgd")))
    torch.manual_seed(0)
    batch = spec.example_batch(BATCH_SIZE)
    graph = capture_file(spec, batch)
    names = [layer.name for layer in graph.layers]
    whole = build_stage(graph, names)
    whole.set_random_key(5, 2, 1)
    loss = whole(batch, {})["loss"]
    loss.backward()
    gradients = {
        name: p.grad.clone() for name, p in graph.model.named_parameters() if p.grad is not None
    }
    graph.model.zero_grad()
    third = max(1, len(names) // 3)
    cuts = [names[:third], names[third : 2 * third], names[2 * third :]]
    groups = [
        [cut[: len(cut) // 2], cut[len(cut) // 2 :]] if recompute and len(cut) > 1 else []
        for cut in cuts
    ]
    stages = [
        ChainedStage(graph, c, BATCH_SIZE, seed=5, recompute=g)
        for c, g in zip(cuts, groups, strict=True)
    ]
    for stage in stages:
        stage.begin(2, {1: batch})
    assert torch.equal(pipelined(graph, stages), loss.detach())
    for name, parameter in graph.model.named_parameters():
        assert (parameter.grad is not None) == (name in gradients)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name])


def test_a_value_for_a_later_stage_is_handed_on(tmp_path: Path) -> None:
    spec = load_model_file(str(write_model(tmp_path, "language", "sgd")))
    graph = capture_file(spec, spec.example_batch(BATCH_SIZE))
    names = [layer.name for layer in graph.layers]
    position = len(names) // 2
    crossing = {spec.name for spec in cut_values(graph, position)}
    assert crossing == {
        e.value
        for e in graph.edges
        if graph.position[e.source] < position <= graph.position[e.target]
    }


def _graph(case: str) -> LayerGraph:
    return capture(CASES[case].build(), CASES[case].batch(4), CASES[case].loss)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stages", [1, 3, 7])
def test_stages_hold_the_models_state_between_them(case: str, stages: int) -> None:
    graph = _graph(case)
    state = graph.model.state_dict()
    parts = [build_stage(graph, names).state_dict() for names in cut_evenly(graph, stages)]
    assert {name for part in parts for name in part} == set(state)
    for part in parts:
        for name, tensor in part.items():
            assert tensor.data_ptr() == state[name].data_ptr()
    if stages == 1:
        assert list(parts[0]) == list(state)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_parameters_are_the_models_own(case: str) -> None:
    graph = _graph(case)
    stage = build_stage(graph, [layer.name for layer in graph.layers])
    theirs = dict(graph.model.named_parameters())
    assert [name for name, _ in stage.named_parameters()] == list(theirs)
    for name, parameter in stage.named_parameters():
        assert parameter is theirs[name]
    assert {n for n, _ in graph.model.named_buffers()} <= {n for n, _ in stage.named_buffers()}


def test_a_stage_holds_only_what_it_uses() -> None:
    graph = _graph("vgg")
    stage = build_stage(graph, ["classifier.3", "classifier.4"])
    assert [name for name, _ in stage.named_parameters()] == [
        "classifier.3.weight",
        "classifier.3.bias",
    ]
    assert [spec.name for spec in stage.received] == ["dropout"]
    assert [spec.name for spec in stage.sent] == ["relu"]
    assert not stage.needs_batch
    assert not stage.has_loss


def test_tied_weights_are_in_both_stages_under_both_names() -> None:
    graph = _graph("gpt2")
    names = [layer.name for layer in graph.layers]
    first, last = build_stage(graph, names[:4]), build_stage(graph, names[-3:])
    for stage in (first, last):
        state = stage.state_dict()
        assert state["wte.weight"].data_ptr() == state["lm_head.weight"].data_ptr()
        assert "wte.weight" in dict(stage.named_parameters())
        assert "lm_head.weight" not in dict(stage.named_parameters())


def test_a_skip_is_relayed_by_the_stages_that_use_it() -> None:
    graph = _graph("unet")
    names = [layer.name for layer in graph.layers]
    cut = [names[:1], names[1:2], names[2:3], names[3:4], names[4:5], names[5:]]
    stages = [build_stage(graph, part) for part in cut]
    received = [[spec.name for spec in stage.received] for stage in stages]
    sent = [[spec.name for spec in stage.sent] for stage in stages]
    # down1's value is used by max_pool2d, which hands it on, and by up2.
    assert received == [[], ["relu"], ["max_pool2d"], ["relu_1"], ["relu", "add"], ["cat"]]
    assert sent == [["relu"], ["relu", "max_pool2d"], ["relu_1"], ["add"], ["cat"], []]


def test_the_stage_with_the_loss_reads_the_target() -> None:
    graph = _graph("vgg")
    names = [layer.name for layer in graph.layers]
    last = build_stage(graph, names[-1:])
    assert last.has_loss
    assert last.needs_batch
    with pytest.raises(ModelFileError, match="got none"):
        last(None, {"linear_2": torch.zeros(4, 10)})


def test_module_names_may_be_those_of_the_stage() -> None:
    class Awkward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.received, self._observer, self._code = (
                nn.Linear(6, 6),
                nn.Linear(6, 6),
                nn.Linear(6, 4),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self._code(self._observer(self.received(x)))
            return result

    batch = Batch((torch.randn(4, 6),), {}, torch.randint(0, 4, (4,)))
    graph = capture(Awkward(), batch, nn.functional.cross_entropy)
    names = [layer.name for layer in graph.layers]
    stage = build_stage(graph, names, variant=OBSERVABLE)
    stage.set_observer(None)
    assert list(stage.state_dict()) == list(graph.model.state_dict())
    assert list(stage(batch, {})) == ["loss"]
    assert list(build_stage(graph, names[:2])(batch, {})) == ["linear_1"]


def test_moving_a_stage_moves_its_weights_alone() -> None:
    graph = _graph("resnet")
    names = [layer.name for layer in graph.layers]
    stage = build_stage(graph, names[:5]).to("meta")
    assert {tensor.device.type for tensor in stage.state_dict().values()} == {"meta"}


def test_lists_stand_for_tuples_as_a_data_loader_makes_them() -> None:
    def weighed(output: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        wanted, weight = target
        return (weight * (output - wanted) ** 2).mean()

    example = Batch((torch.randn(4, 6),), {}, (torch.zeros(4, 2), torch.ones(4, 2)))
    graph = capture(nn.Linear(6, 2), example, weighed)
    stage = build_stage(graph, [layer.name for layer in graph.layers])
    samples = [(torch.randn(6), (torch.randn(2), torch.rand(2))) for _ in range(4)]
    batch = collate(samples)
    expected = weighed(graph.model(*batch.args), batch.target)
    assert torch.equal(stage(batch, {})["loss"], expected)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (Batch((torch.randn(4, 3, 8, 9),), {}, torch.zeros(4, dtype=torch.long)), "shape"),
        (
            Batch((torch.randn(4, 3, 8, 8).double(),), {}, torch.zeros(4, dtype=torch.long)),
            "float64",
        ),
        (Batch((torch.randn(4, 3, 8, 8),), {}, torch.zeros(5, dtype=torch.long)), "target"),
        (
            Batch((torch.randn(4, 3, 8, 8), 1), {}, torch.zeros(4, dtype=torch.long)),
            r"are \(\(\*, \*\), {}, \*\)",
        ),
    ],
)
def test_batches_unlike_the_example_are_refused(batch: Batch, words: str) -> None:
    graph = _graph("vgg")
    stage = build_stage(graph, [layer.name for layer in graph.layers])
    with pytest.raises(ModelFileError, match=words):
        stage(batch, {})


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["features.0", "features.3"], "do not follow"),
        (["features.2", "features.0"], "do not follow"),
        (["nothing"], "no layer 'nothing'"),
        ([], "do not follow"),
    ],
)
def test_layers_that_make_no_stage(names: list[str], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        build_stage(_graph("vgg"), names)


def test_a_stage_computes_in_generated_code() -> None:
    """The saved graph must be gone: an interpreter would look every operation up."""
    graph = _graph("vgg")
    stage = build_stage(graph, [layer.name for layer in graph.layers])
    assert not any(isinstance(module, torch.fx.GraphModule) for module in stage.modules())
    assert stage._code.run.__name__ == "forward"


class _Constants(nn.Module):
    """Training has a constant more, so that evaluation's has the name of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if self.training:
            x = x * torch.tensor([2.0])
        return x + torch.tensor([5.0])


def test_a_stage_in_evaluation_keeps_its_own_constants() -> None:
    torch.manual_seed(0)
    model, batch = _Constants(), Batch((torch.randn(4, 6),), {}, torch.randn(4, 6))
    training, evaluation = (
        capture(model.train(mode), batch, nn.functional.mse_loss) for mode in (True, False)
    )
    stages = [
        build_stage(graph, [layer.name for layer in graph.layers])
        for graph in (training, evaluation)
    ]
    share_buffers(stages[1], stages[0])
    model.eval()
    assert torch.equal(
        stages[1](batch, {})["loss"], nn.functional.mse_loss(model(*batch.args), batch.target)
    )
    assert (
        dict(stages[1].named_buffers())["norm.running_mean"]
        is dict(stages[0].named_buffers())["norm.running_mean"]
    )
