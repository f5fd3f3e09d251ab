"""Does a model cut into stages compute what it computes whole, wherever it is cut?

Each model is cut after every layer at once, so that every value that a cut may send is sent. Loss and gradients are
compared with those of the user's own module, on the device, in three types.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from planner.model.capture.capture import capture_file
from planner.model.options import ModuleOptions, autocast_dtype
from planner.model.spec import TrainingSpec
from planner.profiler.this_machine import thread_count
from planner.selftest.lab import SEED, Lab, location, spec_of
from planner.selftest.rows import Case, Check, Outcome, judged, skipped
from planner.selftest.split import CutError, eager_step, split_step

BATCH_SIZE = 2
BUILT_IN = ("convolutional", "transformer", "recurrent")
BUILDER = "build_tiny"
# Largest difference of a tensor from the eager one, relative to its largest entry. On a CPU the same kernels run in
# the same order. A GPU's may add in any order.
DTYPES = ("float32", "bfloat16", "float16")
LIMITS_CPU = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
LIMITS_CUDA = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
MOST_S = 2.0  # of the processor, for one eager step of two samples
NEEDED = {"transformers": "pip install 'transformers>=4.50'"}  # by models of `profiles/`, and not by the package


def _cases(lab: Lab) -> Iterator[Case]:
    for name in BUILT_IN:
        yield Case(name, partial(_every_cut, lab, location(name, BUILDER)))
    if lab.profiles is not None:
        for path in sorted(lab.profiles.glob("*/model.py")):
            yield Case(f"profiles/{path.parent.name}", partial(_of_profiles, lab, f"{path}:{BUILDER}"))


def _of_profiles(lab: Lab, model: str) -> Outcome:
    source = Path(model.rpartition(":")[0]).read_text(encoding="utf-8")
    for package, remedy in NEEDED.items():
        if package in source and find_spec(package) is None:
            return skipped(f"needs {package}: {remedy}")
    if BUILDER not in source:
        return skipped(f"has no {BUILDER}()")
    return _every_cut(lab, model)


def _every_cut(lab: Lab, model: str) -> Outcome:
    spec = spec_of(model)
    limits = LIMITS_CUDA if lab.cuda else LIMITS_CPU
    differences: dict[str, float] = {}
    left_out: list[str] = []
    layers = 0
    for name in DTYPES:
        # Every GPU has all three types, and every CPU the first.
        if not lab.cuda and name != DTYPES[0] and (reason := _cannot_run(spec, name)):
            left_out.append(f"{name} {reason}")
            continue
        try:
            layers, difference, where = _difference(lab, spec, name)
        except CutError as error:
            return judged(False, f"{name}: {error}")
        if not difference <= limits[name]:
            return judged(False, f"{name}: {where} differs by {difference:.1e}", difference, limits[name])
        differences[name] = difference
    if not differences:
        return judged(False, "; ".join(left_out))
    return judged(True, "; ".join([f"{layers - 1} cuts", _in_words(differences), *left_out]), max(differences.values()))


def _in_words(differences: dict[str, float]) -> str:
    if not any(differences.values()):
        return f"{', '.join(differences)} equal to the bit"
    return ", ".join(f"{name} within {each:.0e}" if each else f"{name} equal" for name, each in differences.items())


class _TooSlowError(Exception):
    """A step took too long."""


def _cannot_run(spec: TrainingSpec, dtype: str) -> str:
    """Say why this CPU cannot run the uncut module in `dtype`, or not in reasonable time; "" if it can.

    A CPU without float16 emulates convolutions a hundred times slower, and has no LSTM in it at all.
    """
    options = ModuleOptions(autocast_dtype(dtype))
    with thread_count(1):
        torch.manual_seed(SEED)
        model, batch = spec.build_model().train(), spec.example_batch(BATCH_SIZE)
        try:
            with _ended_after(MOST_S, model):
                eager_step(model, batch, spec.loss, torch.device("cpu"), options)
        except _TooSlowError:
            return "is too slow to check on this CPU"
        except RuntimeError:
            return "cannot run on this CPU even without cuts"
    return ""


@contextmanager
def _ended_after(seconds: float, model: nn.Module) -> Iterator[None]:
    """End a step that takes more processor time than this, after the module or the gradient at work."""
    latest = time.thread_time() + seconds

    def watch(*_: object) -> None:
        if time.thread_time() > latest:
            raise _TooSlowError

    hooks = [register_module_forward_hook(watch)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks += [parameter.register_hook(watch) for parameter in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _difference(lab: Lab, spec: TrainingSpec, dtype: str) -> tuple[int, float, str]:
    """Return the number of layers, the largest difference of a step cut after each of them, and where it is."""
    options = ModuleOptions(autocast_dtype(dtype), device=lab.device.type)
    with thread_count(1):
        torch.manual_seed(SEED)
        model = spec.build_model()
        batch = spec.example_batch(BATCH_SIZE)
        graph = capture_file(spec, batch, model, options=options)
        graph.model.to(lab.device)
        batch = batch.to(lab.device)
        torch.manual_seed(SEED)
        eager = eager_step(graph.model, batch, spec.loss, lab.device, options)
        torch.manual_seed(SEED)
        split = split_step(graph, batch, [[layer.name] for layer in graph.layers])
    return len(graph.layers), *split.difference(eager)


CHECK = Check("cuts", "do stages compute what the whole model does, at every cut?", _cases)
