"""What makes a layer, what may be cut, and what is refused in which words.

Workers capture the model for themselves and compare hashes with the plan's.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import CaptureError, PlannerError
from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.capture.failure import user_place
from planner.model.capture.graph import LayerGraph
from planner.model.spec import load_model_file
from tests.model.models import CASES, OfFour

SPECS = ["profiles/gpt2/model.py:build_tiny", "profiles/lstm_lm/model.py:build_tiny"]

PROGRAM = """
import sys, torch
from tests.model.capture.test_capture import hash_of
torch.manual_seed(5)
for spec in sys.argv[1:]:
    print(hash_of(spec, 5))
"""


def hash_of(spec: str, batch_size: int) -> str:
    """Of a model file's graph, captured with this batch size."""
    file = load_model_file(Path(__file__).parents[3] / spec)
    return capture(file.build_model(), file.example_batch(batch_size), file.loss).hash


@pytest.mark.slow
def test_hash_is_the_same_in_every_process() -> None:
    torch.manual_seed(2)
    theirs = subprocess.run(
        [sys.executable, "-c", PROGRAM, *SPECS],
        cwd=Path(__file__).parents[3],
        env={"PYTHONHASHSEED": "5", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout.split()
    assert theirs == [hash_of(spec, 2) for spec in SPECS]


def _graph(case: str, batch_size: int = 4) -> LayerGraph:
    return capture(CASES[case].build(), CASES[case].batch(batch_size), CASES[case].loss)


def _ops(graph: LayerGraph) -> list[tuple[str, str]]:
    return [(layer.name, layer.op) for layer in graph.layers]


def test_layers_of_a_sequential_model() -> None:
    assert _ops(_graph("vgg")) == [
        ("features.0", "Conv2d+ReLU"),  # an in-place ReLU cannot be cut from what it changes
        ("features.2", "MaxPool2d"),
        ("features.3", "Conv2d+ReLU"),
        ("features.5", "MaxPool2d"),  # and flatten
        ("classifier.0", "Linear+ReLU"),
        ("classifier.2", "Dropout"),
        ("classifier.3", "Linear"),
        ("classifier.4", "ReLU"),
        ("classifier.5", "Dropout"),
        ("classifier.6", "Linear"),
        ("loss", "loss"),
    ]


def test_layers_of_a_functional_model() -> None:
    assert _ops(_graph("unet")) == [
        ("down1", "Conv2d"),
        ("max_pool2d", "aten.max_pool2d"),
        ("down2", "Conv2d"),
        ("middle", "Conv2d"),
        ("up2", "ConvTranspose2d"),
        ("up1", "Conv2d"),
        ("head", "Conv2d"),
        ("loss", "loss"),
    ]


def test_layers_of_attention() -> None:
    names = [layer.name for layer in _graph("gpt2").layers if layer.name.startswith("h.0")]
    assert names == [
        "h.0.ln_1",
        "h.0.attn.c_attn",
        "h.0.attn.scaled_dot_product_attention",
        "h.0.attn.c_proj",
        "h.0.attn.dropout",
        "h.0.ln_2",
        "h.0.mlp.c_fc",
        "h.0.mlp.gelu",
        "h.0.mlp.c_proj",
        "h.0.mlp.dropout",
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_every_operation_is_in_one_layer_and_edges_go_forward(case: str) -> None:
    graph = _graph(case)
    nodes = [node for layer in graph.layers for node in layer.nodes]
    assert len(nodes) == len(set(nodes))
    order = {node: index for index, node in enumerate(graph.module.graph.nodes)}
    assert sorted(nodes, key=order.__getitem__) == nodes
    assert len({layer.name for layer in graph.layers}) == len(graph.layers)
    for edge in graph.edges:
        assert graph.position[edge.source] < graph.position[edge.target]
        assert edge.value in graph.values
    assert graph.batch_size is None


def test_a_module_called_twice_makes_two_layers() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(self.layer(x))
            return result

    assert [layer.name for layer in _capture(Twice()).layers] == ["layer", "layer_2", "loss"]


def test_a_skip_is_an_edge_to_each_user() -> None:
    edges = {(edge.source, edge.target) for edge in _graph("unet").edges}
    # up2 includes the concatenation with down1's value, and middle the addition of down2's.
    assert edges == {
        *(("down1", "max_pool2d"), ("down1", "up2"), ("max_pool2d", "down2"), ("down2", "middle")),
        *(("middle", "up2"), ("up2", "up1"), ("up1", "head"), ("head", "loss")),
    }


def test_tied_parameters_have_all_their_names() -> None:
    graph = _graph("gpt2")
    assert graph.tied_parameters == (("wte.weight", "lm_head.weight"),)
    assert graph.layers[-2].name == "lm_head"
    assert graph.layers[-2].parameters == ("wte.weight",)


def test_unused_weights_belong_to_some_layer() -> None:
    graph = _graph("mixed")
    held = [name for layer in graph.layers for name in (*layer.parameters, *layer.buffers)]
    state = {*dict(graph.model.named_parameters()), *dict(graph.model.named_buffers())}
    assert set(held) == state


def test_integers_and_values_without_gradient_carry_none() -> None:
    values = _graph("constant first").values.values()
    assert {spec.dtype.is_floating_point for spec in values} == {True, False}
    for spec in values:
        assert spec.requires_grad == spec.dtype.is_floating_point


def test_shapes_follow_the_batch_size() -> None:
    graph = _graph("gpt2")
    spec = graph.values["layer_norm"]
    assert spec.shape(4) == (4, 12, 16)
    assert spec.shape(7) == (7, 12, 16)
    assert spec.size_bytes(7) == 7 * 12 * 16 * 4


def test_a_model_that_pins_its_batch_size_says_so() -> None:
    assert _capture(OfFour()).batch_size == 4


def test_buffers_of_a_module_with_two_names_stay() -> None:
    """The tracer wraps such modules anew at each look, and a buffer in a new wrapper is not a new
    one.
    """

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((6,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x / self.get_buffer("scale")

    class Known(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scaling = nn.Linear(6, 6), Scaling()
            self.watched = nn.Sequential(self.scaling, self.layer)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(self.scaling(self.scaling(x)))
            return result

    model = Known()
    graph = _capture(model)
    assert any(layer.name == "scaling" for layer in graph.layers)
    assert torch.equal(model.scaling.get_buffer("scale"), torch.full((6,), 2.0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_hash_is_of_the_model_and_not_of_the_batch_size(case: str) -> None:
    sizes = (1, 2, 4) if case not in ("resnet", "shared norm") else (2, 4)
    assert len({_graph(case, size).hash for size in sizes}) == 1


def test_hash_tells_models_apart() -> None:
    models = [
        nn.Linear(6, 6),
        nn.Linear(6, 6, bias=False),
        nn.Linear(6, 5),
        nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
    ]
    models += [
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)),
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)),
    ]
    assert len({_capture(model).hash for model in models}) == len(models)


def test_capture_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = CASES["mixed"].build().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    batch = CASES["mixed"].batch(4)
    state = torch.get_rng_state()
    capture(model, batch, CASES["mixed"].loss)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    model(*batch.args, **batch.kwargs)


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(_: object, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Model(nn.Module):
    def __init__(self, body: Callable[[_Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.embedding = nn.Embedding(4, 6, max_norm=1.0)
        self.register_buffer("mean", torch.zeros(6))
        self.state = torch.zeros(1)
        self.history: list[Tensor] = []
        self._body = body

    def forward(self, x: Tensor) -> Tensor:
        return self._body(self, x)


def _branch(model: _Model, x: Tensor) -> Tensor:
    x = model.layer(x)
    if x.sum() > 0:  # the line that the message names
        return x
    return -x


def _item(model: _Model, x: Tensor) -> Tensor:
    result: Tensor = model.layer(x) * float(x.sum().item())
    return result


def _straight_through(model: _Model, x: Tensor) -> Tensor:
    result: Tensor = _Sign.apply(model.layer(x))  # type: ignore[no-untyped-call]
    return result


def _max_norm(model: _Model, x: Tensor) -> Tensor:
    result: Tensor = model.layer(x) + model.embedding((x[:, 0] > 0).long())
    return result


def _nested_view(model: _Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.layer.weight[0].view(2, 3).mul_(0.9)
    result: Tensor = model.layer(x)
    return result


def _state(model: _Model, x: Tensor) -> Tensor:
    result: Tensor = model.layer(x) + model.state
    model.state = x.mean()
    return result


def _buffer(model: _Model, x: Tensor) -> Tensor:
    model.mean = 0.9 * torch.as_tensor(model.mean) + 0.1 * x.mean(0)
    result: Tensor = model.layer(x) + model.mean
    return result


def _history(model: _Model, x: Tensor) -> Tensor:
    model.history.append(x.mean())
    result: Tensor = model.layer(x) + model.history[0]
    return result


def _detached(model: _Model, x: Tensor) -> Tensor:
    result: Tensor = model.layer(x).detach()
    return result


def _wrong_shape(model: _Model, x: Tensor) -> Tensor:
    result: Tensor = model.layer(x) @ torch.ones(3, 3)
    return result


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (_branch, ["test_capture.py", "if x.sum() > 0", "values of a tensor"]),
        (_item, ["test_capture.py", ".item()", "values of a tensor"]),
        (_straight_through, ["'_Sign'", "backward"]),
        (_max_norm, ["'embedding.weight'", "changed in forward"]),
        (_nested_view, ["'layer.weight'", "changed in forward"]),
        (_state, ["'self.state'", "keeps a tensor"]),
        (_buffer, ["'self.mean'", "keeps a tensor"]),
        (_history, ["'self.history'", "keeps a tensor"]),
        (_detached, ["loss", "parameters"]),
        (_wrong_shape, ["test_capture.py", "@ torch.ones(3, 3)"]),
    ],
)
def test_what_cannot_be_captured_is_refused(
    body: Callable[[_Model, Tensor], Tensor], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as caught:
        _capture(_Model(body))
    for word in words:
        assert word in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", "")


def test_the_users_warnings_are_heard() -> None:
    def body(model: _Model, x: Tensor) -> Tensor:
        warnings.warn("mind the step", UserWarning, stacklevel=1)
        result: Tensor = model.layer(x)
        return result

    with pytest.warns(UserWarning, match="mind the step"):
        _capture(_Model(body))


def test_attention_kept_for_inspection_is_no_state() -> None:
    def body(model: _Model, x: Tensor) -> Tensor:
        output: Tensor = model.layer(x)
        model.last_output = output
        return output

    model = _Model(body)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _capture(model)
    assert not hasattr(model, "last_output")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, _: output, "single number"),
        (lambda output, _: 3.0, "returned a float"),
        (lambda _, target: target.float().mean(), "does not depend on the model's parameters"),
        (None, "defines no loss"),
    ],
)
def test_losses_that_are_none(loss: Callable[[Tensor, Tensor], Tensor] | None, words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        capture(nn.Linear(6, 6), _rows(), loss)


def test_errors_name_the_users_file(tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text("def branch(x):\n    if x.sum() > 0:\n        return x\n    return -x\n")
    namespace: dict[str, Callable[[Tensor], Tensor]] = {}
    exec(compile(source.read_text(), str(source), "exec"), namespace)
    with pytest.raises(CaptureError, match=f"{source}:2"):
        _capture(_Model(lambda model, x: namespace["branch"](model.layer(x))))


def _rows() -> Batch:
    return Batch((torch.randn(4, 6),), {}, torch.randint(0, 4, (4,)))


def _capture(model: nn.Module) -> LayerGraph:
    return capture(model, _rows(), F.cross_entropy)


class _OwnLoss(nn.Module):
    """Tokens and labels in, loss out: language models are tried with the same tensor for both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.embedding(tokens)), labels)}


def test_one_tensor_given_twice_is_two_inputs() -> None:
    """The tracer takes equal tensors for one: the embedding would read the labels."""
    tokens = torch.randint(0, 10, (4,))
    graph = capture(_OwnLoss(), Batch((), {"tokens": tokens, "labels": tokens}), None)
    embedding = next(
        node for node in graph.module.graph.nodes if "embedding" in str(node.target) and node.args
    )
    assert str(embedding.args[1]) == "kwargs_tokens"


def test_places_of_operations_that_only_library_modules_ask_for() -> None:
    """They were once all said to be in loss(), because the frame that calls the loss also calls the
    model.
    """
    batch = Batch((torch.randn(4, 3),), {}, torch.randn(4, 2))
    graph = capture(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), batch, F.mse_loss)
    places = {node.name: user_place(node) for node in graph.owner}
    assert (places["linear"], places["tanh"], places["mse_loss"]) == (
        "module '0'",
        "module '1'",
        "loss()",
    )
