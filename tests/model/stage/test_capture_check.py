"""What changes gradients is refused, or stays as it is; what the user is told to write instead
trains as one process.

Each model is one of a kind: a hook on a value in the model, in its loss, on a module, on a
parameter, on what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.modules.module import register_module_full_backward_hook

from planner.errors import CaptureError
from planner.model.capture.capture import capture_file
from planner.model.options import PLAIN
from planner.model.spec import TrainingSpec, in_memory
from planner.model.stage.capture_check import check_captured, further_batches
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split

OPTIONS = ProfilingOptions(device="cpu", seconds=0.0, repeats=1)
Middle = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, middle: Middle = lambda x: x, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dropout, self.second = (
            nn.Linear(6, 6),
            nn.Dropout(dropout),
            nn.Linear(6, 6),
        )
        self._middle = middle

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.dropout(self._middle(torch.tanh(self.first(x)))))
        return result


def spec_of(
    model: nn.Module, loss: Callable[[Any, Any], Tensor] = F.mse_loss, **more: Any
) -> TrainingSpec:
    example_batch = more.pop(
        "example_batch", lambda size: ((torch.randn(size, 6),), torch.randn(size, 6))
    )
    return in_memory(model, example_batch=example_batch, loss=loss, **more)


def check(spec: TrainingSpec) -> None:
    """Capture and compare, as `profile` does."""
    batch = spec.example_batch(8)
    graph = capture_file(spec, batch)
    check_captured(spec, graph, [batch, *further_batches(spec, graph, batch)], PLAIN)


# -- In forward, and in the loss. --


def hooked(x: Tensor) -> Tensor:
    x = x * 1.0
    x.register_hook(lambda gradient: -0.5 * gradient)  # type: ignore[no-untyped-call]
    return x


def hooked_together(x: Tensor) -> Tensor:
    x = x * 1.0
    register_multi_grad_hook((x,), lambda gradients: gradients[0].mul_(-1))
    return x


def hooked_if_trained(x: Tensor) -> Tensor:
    """Register a hook where no tracer sees it."""
    x = x * 1.0
    if x.grad_fn is not None:
        x.grad_fn.register_hook(
            lambda inputs, _: tuple(None if each is None else -each for each in inputs)
        )
    return x


def hooked_before(x: Tensor) -> Tensor:
    x = x * 1.0
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(lambda outputs: tuple(-each for each in outputs))
    return x


def saved_in_few_digits(x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor.round(), lambda tensor: tensor):
        return (3 * x).sin()


def inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        turned = x.sin()
    return turned.clone()


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        turned = x.sin()
    return turned.clone()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def custom(x: Tensor) -> Tensor:
    result: Tensor = Reversed.apply(x)  # type: ignore[no-untyped-call]
    return result


DROPPED = "a captured graph would drop it"
OTHER_GRADIENTS = r"equal losses, but other gradients of parameter 'first\.weight': norms of"


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (hooked, DROPPED),
        (hooked_together, DROPPED),
        (hooked_if_trained, OTHER_GRADIENTS),
        (hooked_before, OTHER_GRADIENTS),
        (saved_in_few_digits, OTHER_GRADIENTS),
        (custom, "the autograd function 'Reversed', whose backward cannot be captured"),
    ],
)
def test_what_changes_gradients_in_forward_is_refused(
    middle: Middle, message: str, dropout: float
) -> None:
    with pytest.raises(CaptureError, match=message) as refused:
        check(spec_of(Net(middle, dropout=dropout)))
    assert "blocks(model)" in str(refused.value.hint)


def test_inference_mode_is_refused_and_no_grad_is_the_way_out() -> None:
    with pytest.raises(
        CaptureError, match=r"other gradients of parameter 'first\.weight': none and"
    ) as refused:
        check(spec_of(Net(inferred)))
    assert "torch.no_grad for torch.inference_mode" in str(refused.value.hint)
    check(spec_of(Net(without_gradients)))


@pytest.mark.parametrize("middle", [hooked, hooked_if_trained, custom])
def test_the_same_in_the_loss_is_refused(middle: Middle) -> None:
    with pytest.raises(
        CaptureError, match=r"drop it|other gradients of parameter|autograd function"
    ):
        check(spec_of(Net(), lambda output, target: F.mse_loss(middle(output), target)))


def test_a_head_that_begins_at_zero_hides_nothing() -> None:
    """Behind its weights all gradients are zero, with a hook and without."""
    model = Net(hooked_if_trained)
    nn.init.zeros_(model.second.weight)
    with pytest.raises(CaptureError, match=OTHER_GRADIENTS):
        check(spec_of(model))
    assert not model.second.weight.any(), "and it is zero again"


def test_a_refused_hook_is_named_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"test_capture_check\.py:\d+"):
        check(spec_of(Net(hooked)))


# -- On modules. --


def turn(_: nn.Module, *gradients: Any) -> Any:
    return tuple(None if each is None else -each for each in gradients[0])


@pytest.mark.parametrize(
    "register",
    [
        lambda model: model.first.register_full_backward_hook(turn),
        lambda model: model.first.register_full_backward_pre_hook(turn),
        lambda model: model.first.register_backward_hook(turn),
        lambda model: model.register_full_backward_hook(turn),
    ],
)
def test_backward_hooks_of_modules_are_refused(register: Callable[[nn.Module], object]) -> None:
    model = Net()
    register(model)
    with pytest.raises(CaptureError, match=f"has a backward hook, and {DROPPED}"):
        check(spec_of(model))


def test_a_backward_hook_of_all_modules_is_refused() -> None:
    handle = register_module_full_backward_hook(turn)
    try:
        with pytest.raises(CaptureError, match="a backward hook is registered for all modules"):
            check(spec_of(Net()))
    finally:
        handle.remove()
    check(spec_of(Net()))  # the way out


def test_a_forward_hook_that_adds_one_is_refused() -> None:
    model = Net()
    model.first.register_forward_hook(lambda _, __, output: hooked(output))
    with pytest.raises(CaptureError, match=DROPPED):
        check(spec_of(model))


def test_a_forward_hook_that_computes_is_captured() -> None:
    model = Net()
    model.first.register_forward_hook(lambda _, __, output: 2 * output)
    check(spec_of(model))


# -- On parameters. --


def masked(model: Net) -> None:
    keep = torch.zeros(6, 6)
    keep[:2] = 1
    model.first.weight.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: gradient * keep
    )


def observed_only(model: Net) -> None:
    norms: list[Tensor] = []
    model.first.weight.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: norms.append(gradient.norm())
    )


@pytest.mark.parametrize("register", [masked, observed_only])
def test_linear_hooks_of_parameters_stay(register: Callable[[Net], None]) -> None:
    model = Net()
    register(model)
    spec = spec_of(model)
    check(spec)
    batch = spec.example_batch(8)
    graph = capture_file(spec, batch)
    assert_same(
        run_model(graph, batch, F.mse_loss), run_split(graph, batch, cut_evenly(graph, 3), None)
    )


def clipped_in_place(gradient: Tensor) -> None:
    gradient.clamp_(-1e-2, 1e-2)


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(lambda gradient: gradient.clamp(-1e-2, 1e-2), id="clipped by value"),
        pytest.param(lambda gradient: gradient / (gradient.norm() + 1e-6), id="normalised"),
        pytest.param(lambda gradient: gradient + 0.1, id="shifted"),
        pytest.param(clipped_in_place, id="clipped in place"),
    ],
)
def test_a_hook_that_would_see_a_part_of_a_sum_is_refused(hook: Callable[[Tensor], Any]) -> None:
    model = Net()
    model.first.weight.register_hook(hook)  # type: ignore[no-untyped-call]
    with pytest.raises(
        CaptureError, match="whose result for a sum of gradients is not the sum of its results"
    ):
        check(spec_of(model))


def test_hooks_after_accumulation_and_on_several_parameters_are_refused() -> None:
    model = Net()
    model.first.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda parameter: None
    )
    with pytest.raises(
        CaptureError, match="has a hook that runs after its gradient is accumulated"
    ):
        check(spec_of(model))

    for mode in ("all", "any"):
        model = Net()
        register_multi_grad_hook(
            (model.first.weight, model.second.weight), lambda _: None, mode=mode
        )
        with pytest.raises(CaptureError, match="has a hook on the gradients of several tensors"):
            check(spec_of(model))


# -- Ways out that messages name. --


def reversed_by_operations(x: Tensor) -> Tensor:
    return x * -0.5 + x.detach() * 1.5


def test_a_gradient_is_turned_round_by_operations() -> None:
    spec = spec_of(Net(reversed_by_operations))
    check(spec)
    batch = spec.example_batch(8)
    graph = capture_file(spec, batch)
    split = run_split(graph, batch, cut_evenly(graph, 3), None)
    assert_same(run_model(graph, batch, F.mse_loss), split)

    hook = Net(hooked)
    F.mse_loss(hook(*batch.args), batch.target).backward()  # type: ignore[no-untyped-call]
    for name, parameter in hook.named_parameters():
        torch.testing.assert_close(split.gradients[name], parameter.grad)


class Hooked(nn.Module):
    """A block with hooks of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.layer.register_full_backward_hook(turn)

    def forward(self, x: Tensor) -> Tensor:
        return custom(hooked(self.layer(x)))


def test_blocks_keep_their_hooks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Hooked(), nn.Linear(6, 6))
    spec = spec_of(model, lambda output, target: F.mse_loss(hooked(output), target))
    spec = TrainingSpec(spec.name, {**spec.functions, "blocks": list})
    check(spec)
    batch = spec.example_batch(8)
    graph = capture_file(spec, batch)
    assert_same(
        run_model(graph, batch, spec.loss), run_split(graph, batch, cut_evenly(graph, 3), None)
    )


def test_a_backward_hook_around_blocks_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model.register_full_backward_hook(turn)
    spec = spec_of(model)
    with pytest.raises(CaptureError, match="Sequential has a backward hook"):
        check(TrainingSpec(spec.name, {**spec.functions, "blocks": list}))


# -- What the check looks at, and what it leaves. --


def test_a_constant_that_fits_the_captured_batch_is_found_by_another() -> None:
    """The scale was computed outside of PyTorch from the values of one batch."""
    drawn: list[float] = []

    def example_batch(size: int) -> Sequence[Any]:
        drawn.append(1.0 + len(drawn))
        return (torch.randn(size, 6),), torch.randn(size, 6)

    spec = spec_of(Net(lambda x: x * drawn[-1]), example_batch=example_batch)
    batch = spec.example_batch(8)
    graph = capture_file(spec, batch)
    check_captured(spec, graph, [batch], PLAIN)
    further = further_batches(spec, graph, batch)
    with pytest.raises(CaptureError, match=r"the model and its captured layers give losses of"):
        check_captured(spec, graph, further[:1], PLAIN)


def test_a_weight_without_gradient_is_none_in_both() -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(6, 6)

    check(spec_of(Unused()))


def test_the_check_leaves_everything_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))
    model[0].weight.grad = torch.ones(6, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    spec = spec_of(model)
    batch = spec.example_batch(8)
    graph = capture_file(spec, batch)
    torch.set_rng_state(state)
    check_captured(spec, graph, [batch, *further_batches(spec, graph, batch)], PLAIN)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].weight.grad, torch.ones(6, 6))
    assert model[3].weight.grad is None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_profile_says_that_it_was_checked() -> None:
    assert profile_model(spec_of(Net()), 8, OPTIONS).capture_checked is True
