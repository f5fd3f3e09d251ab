"""Is a model cut after every layer at once as close to the true loss and gradients as it is whole?

The truth is a step of the module in float64; capturing may change rounding, so errors are compared.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn

from planner.errors import first_line
from planner.model.batch import Batch
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.loss import unsplit_loss
from planner.model.options import PLAIN, ModuleOptions, autocast_dtype
from planner.model.randomness import keep_state
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.stage import build_stage
from planner.profiler.this_machine import thread_count
from planner.selfcheck.lab import SEED, Case, Lab, Outcome, judged, location

# times the error of the whole model; of 90 tensors of T5 and BERT in bfloat16 the largest was 1.2
MOST = 3.0
DTYPES: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16", "float16")

Step = dict[str, Tensor]  # the loss, and the gradients by the parameters' names


def cases(lab: Lab) -> Iterator[Case]:
    """Yield a case for each built-in model, and for each of the user's."""
    models = {name: location(f"build_{name}") for name in ("convolutional", "transformer")}
    models |= {model: model for model in lab.models}
    for name, model in models.items():
        yield name, partial(_in_all_types, lab, model)


def _in_all_types(lab: Lab, model: str) -> Outcome:
    spec = load_model_file(model)
    said = []
    largest = 0.0
    for dtype in DTYPES:
        options = ModuleOptions(autocast_dtype(dtype), device=lab.device.type)
        with thread_count(1):
            graph, batch = _captured(spec, options, lab.device)
            try:
                whole = whole_step(spec, graph.model, batch, options)
            except RuntimeError as error:
                # every GPU has all three types, and a CPU may lack some kernels in float16
                if lab.on_gpu:
                    raise
                why = first_line(error)
                said.append(f"{dtype} cannot run on this CPU even without cuts ({why})")
                continue
            cut = cut_step(graph, batch)
            exact = whole_step(spec, graph.model.double(), _in_float64(batch), PLAIN)

        eps = torch.finfo(autocast_dtype(dtype) or torch.float32).eps
        ratio, name = error_ratio(cut, whole, exact, eps)
        if not ratio <= MOST:
            told = f"{dtype}: the error of {name} is {ratio:.2g} times that of the whole model"
            return judged(False, told, ratio, MOST)
        said.append(f"{dtype} has at most {ratio:.2f} times the error")
        largest = max(largest, ratio)

    cuts = f"{len(graph.layers) - 1} cuts"
    return judged(True, "; ".join([cuts, *said]), largest, MOST)


def _captured(
    spec: TrainingSpec, options: ModuleOptions, device: torch.device
) -> tuple[LayerGraph, Batch]:
    """Return the model's graph on the device, without dropout, and a batch of two samples."""
    torch.manual_seed(SEED)
    module = spec.build_model()
    batch = spec.example_batch(2)
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0  # a GPU draws other random numbers in float64

    graph = capture_file(spec, batch, module, options=options)
    graph.model.to(device)
    return graph, batch.to(device)


def _in_float64(batch: Batch) -> Batch:
    leaves, tree = batch.flatten()
    wide = [
        leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        for leaf in leaves
    ]
    return Batch(*tree.unflatten(wide))


def error_ratio(cut: Step, whole: Step, exact: Step, eps: float) -> tuple[float, str]:
    """Return the largest error of the cut model's tensors relative to that of the whole model's,
    and which it is of.

    An error is the norm of the difference from `exact`. By chance the whole model may have next to
    none in a tensor of few entries, so each tensor is allowed the model's usual share of its norm,
    too: the median, and at least `eps`.
    """
    if missing := cut.keys() ^ whole.keys():
        return math.inf, f"'{min(missing)}', whose gradient one of the two has not,"

    def error(step: Step, name: str) -> float:
        return float((step[name] - exact[name]).double().norm())

    norms = {name: float(exact[name].double().norm()) for name in whole}
    usual = max(eps, median(error(whole, name) / norm for name, norm in norms.items() if norm > 0))
    ratios = {
        name: error(cut, name) / max(error(whole, name), usual * norm, eps**2)
        for name, norm in norms.items()
    }
    worst = max(ratios, key=lambda name: (math.isnan(ratios[name]), ratios[name]))
    return ratios[worst], f"'{worst}'"


def whole_step(spec: TrainingSpec, model: nn.Module, batch: Batch, options: ModuleOptions) -> Step:
    """Run a step of the model as it is."""
    with _fresh(model):
        loss = unsplit_loss(model, spec, batch, options)
        torch.autograd.backward(loss)
        return _result(loss, model)


def cut_step(graph: LayerGraph, batch: Batch) -> Step:
    """Run the same step with a stage for each layer; values cross as messages carry them."""
    with _fresh(graph.model):
        values: dict[str, Tensor] = {}
        for layer in graph.layers:
            stage = build_stage(graph, [layer.name]).to(batch.device_type)
            received = {
                spec.name: _carried(spec, values[spec.name], batch) for spec in stage.received
            }
            results = stage(batch if stage.needs_batch else None, received)
            for spec in stage.sent:
                _check_sent(spec, results[spec.name], batch)
            values.update(results)
        torch.autograd.backward(values["loss"])
        return _result(values["loss"], graph.model)


def _carried(spec: ValueSpec, value: Tensor, batch: Batch) -> Tensor:
    message = spec.to_wire(value).clone(memory_format=torch.contiguous_format)
    return spec.from_wire(message, batch.size)


def _check_sent(spec: ValueSpec, value: Tensor, batch: Batch) -> None:
    """Raise ValueError for a value that is not as it was captured."""
    found = (tuple(value.shape), value.dtype, value.requires_grad)
    captured = (spec.shape(batch.size), spec.dtype, spec.requires_grad)
    if found != captured:
        raise ValueError(
            f"'{spec.name}' has shape, type and need of a gradient {found}, captured {captured}"
        )


def _result(loss: Tensor, model: nn.Module) -> Step:
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": loss.detach()} | gradients


@contextmanager
def _fresh(model: nn.Module) -> Iterator[None]:
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(SEED)
    with keep_state(model):
        yield
