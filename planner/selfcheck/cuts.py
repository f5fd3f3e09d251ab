"""Is a model cut into stages as close to the true loss and gradients as it is whole, wherever it is cut?

Each model is cut after every layer at once, so that every value that a cut may send is sent. The truth is a step of the
user's own module in float64. Capturing a module may change its rounding, so equality would ask too much; what is
compared is the error. That also judges a gradient whose true value is zero, such as that of a key's bias in attention,
of which both have nothing but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn

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

SAMPLES = 2
MOST = 3.0  # times the error of the whole model; of 90 tensors of T5 and BERT in bfloat16 the largest was 1.2
DTYPES: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16", "float16")

Step = dict[str, Tensor]  # the loss, and the gradients by the parameters' names


def cases(lab: Lab) -> Iterator[Case]:
    """Yield a case for each built-in model and for those that the user names."""
    for name in ("convolutional", "transformer"):
        yield name, partial(_in_all_types, lab, location(f"build_{name}"))
    for model in lab.models:
        yield model, partial(_in_all_types, lab, model)


def _in_all_types(lab: Lab, model: str) -> Outcome:
    spec, said, largest, count = load_model_file(model), [], 0.0, 0
    for dtype in DTYPES:
        options = ModuleOptions(autocast_dtype(dtype), device=lab.device.type)
        with thread_count(1):
            torch.manual_seed(SEED)
            module, batch = spec.build_model(), spec.example_batch(SAMPLES)
            for dropout in (each for each in module.modules() if isinstance(each, nn.Dropout)):
                dropout.p = 0.0  # a GPU draws other random numbers in float64
            graph = capture_file(spec, batch, module, options=options)
            graph.model.to(lab.device)
            batch = batch.to(lab.device)
            try:
                whole = whole_step(spec, graph.model, batch, options)
            except RuntimeError as error:
                if lab.on_gpu:  # every GPU has all three types, and a CPU may lack some kernels in float16
                    raise
                said.append(f"{dtype} cannot run on this CPU even without cuts ({str(error).splitlines()[0]})")
                continue
            cut = cut_step(graph, batch)
            # Before the module becomes float64, which widens the gradients that it holds.
            same = all(torch.equal(cut[name], whole[name]) for name in cut.keys() & whole.keys())
            leaves, tree = batch.flatten()
            wide = [each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in leaves]
            exact = whole_step(spec, graph.model.double(), Batch(*tree.unflatten(wide)), PLAIN)
        ratio, name = error_ratio(cut, whole, exact, torch.finfo(autocast_dtype(dtype) or torch.float32).eps)
        if not ratio <= MOST:
            return judged(
                False, f"{dtype}: the error of {name} is {ratio:.2g} times that of the whole model", ratio, MOST
            )
        said.append(f"{dtype} {'equal to the bit' if same else f'has at most {ratio:.2f} times the error'}")
        largest, count = max(largest, ratio), len(graph.layers) - 1
    return judged(True, "; ".join([f"{count} cuts", *said]), largest, MOST)


def error_ratio(cut: Step, whole: Step, exact: Step, eps: float) -> tuple[float, str]:
    """Return the largest error of the cut model's tensors relative to that of the whole model's, and which it is of.

    An error is the norm of the difference from `exact`. By chance the whole model may have next to none in a tensor of
    few entries, so each tensor is allowed the model's usual share of its norm, too: the median, and at least `eps`.
    """
    if missing := cut.keys() ^ whole.keys():
        return math.inf, f"'{min(missing)}', whose gradient one of the two has not,"

    def error(step: Step, name: str) -> float:
        return float((step[name] - exact[name]).double().norm())

    norms = {name: float(exact[name].double().norm()) for name in whole}
    usual = max(eps, median(error(whole, name) / norm for name, norm in norms.items() if norm > 0))
    ratios = {name: error(cut, name) / max(error(whole, name), usual * norm, eps**2) for name, norm in norms.items()}
    worst = max(ratios, key=lambda name: (math.isnan(ratios[name]), ratios[name]))
    return ratios[worst], f"'{worst}'"


def whole_step(spec: TrainingSpec, model: nn.Module, batch: Batch, options: ModuleOptions) -> Step:
    """Run a step of the user's own module; its buffers stay as they were."""
    with _fresh(model):
        value = unsplit_loss(model, spec, batch, options)
        torch.autograd.backward(value)
        return _step(value, model)


def cut_step(graph: LayerGraph, batch: Batch) -> Step:
    """Run the same step with a stage for each layer, forward and then backward in reverse, as workers would.

    Values cross as copies without history, gradients return by hand. The stages share the module's weights.
    """
    with _fresh(graph.model):
        known: dict[str, Tensor] = {}
        runs = []
        for stage in (build_stage(graph, [layer.name]).to(batch.device_type) for layer in graph.layers):
            received = {
                spec.name: _through_a_message(spec, known[spec.name], batch.size).requires_grad_(spec.requires_grad)
                for spec in stage.received
            }
            results = stage(batch if stage.needs_batch else None, received)
            for spec in stage.sent:
                value, wanted = results[spec.name], (spec.shape(batch.size), spec.dtype, spec.requires_grad)
                if (found := (tuple(value.shape), value.dtype, value.requires_grad)) != wanted:
                    raise ValueError(f"'{spec.name}' has shape, type and need of a gradient {found}, captured {wanted}")
            known.update(results)
            runs.append((stage, received, results))
        gradients: dict[str, Tensor] = {}  # of the values that cross
        for stage, received, results in reversed(runs):
            crossing = [spec.name for spec in stage.sent if spec.requires_grad and spec.name in gradients]
            seeds: list[tuple[Tensor, Tensor | None]] = [(results[name], gradients.pop(name)) for name in crossing]
            seeds += [(results["loss"], None)] if stage.has_loss else []
            if seeds:
                torch.autograd.backward([root for root, _ in seeds], [seed for _, seed in seeds])
            for spec in stage.received:
                if (gradient := received[spec.name].grad) is not None:
                    gradients[spec.name] = _through_a_message(spec.of_gradient, gradient, batch.size)
        return _step(known["loss"], graph.model)


def _through_a_message(spec: ValueSpec, value: Tensor, batch_size: int) -> Tensor:
    """Return what a message makes of a value: memory of its own, without gaps and without history."""
    copy = spec.to_wire(value.detach()).clone(memory_format=torch.contiguous_format)
    return spec.from_wire(copy, batch_size)


def _step(loss: Tensor, model: nn.Module) -> Step:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach()} | gradients


@contextmanager
def _fresh(model: nn.Module) -> Iterator[None]:
    """Begin without gradients and with the same random numbers, and put the buffers back at the end."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(SEED)
    with keep_state(model):
        yield
