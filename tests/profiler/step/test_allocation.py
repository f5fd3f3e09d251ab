"""Workspaces: what layers allocate beyond what is saved, and the cost model's peak from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from planner.cost.work import working_bytes
from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.capture.graph import LOSS
from planner.model.spec import load_model_file
from planner.model.stage.parts import OBSERVABLE, LayerObserver
from planner.model.stage.stage import build_stage
from planner.profiler.step.allocation import saved_bytes, tensors_of_batch, workspace_bytes
from planner.profiler.step.update import update_workspaces

BATCH, WIDTH, MANY = 64, 256, 40
ROWS = BATCH * WIDTH * 4  # bytes of a batch of activations


class Spread(nn.Module):
    """Needs many times its input meanwhile, and saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, MANY).view(x.shape[0], MANY, -1).sum(dim=1)


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Spread(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    )


class Branches(nn.Module):
    """Has a convolution, and a value that is used again later."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.out = nn.Linear(16 * 8 * 8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x.view(-1, 3, 8, 8)).relu()
        z: Tensor = self.out(torch.flatten(self.two(y).sigmoid() * y, 1))
        return z


def measured(model: nn.Module, batch: Batch) -> tuple[list[str], list[int], list[int], list[int]]:
    """Return the layers, and their bytes saved, of gradients and of workspace."""
    graph = capture(model, batch, lambda output, target: ((output - target) ** 2).mean())
    stage = build_stage(graph, [layer.name for layer in graph.layers], variant=OBSERVABLE)
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    gradients = [sum(sizes[name] for name in layer.parameters) for layer in graph.layers]

    def forward(observer: LayerObserver) -> dict[str, Tensor]:
        stage.set_observer(observer)
        results: dict[str, Tensor] = stage(batch, {})
        return results

    saved = saved_bytes([stage], forward, len(graph.layers))
    of_batch = sum(tensor.nbytes for tensor in tensors_of_batch(batch))
    cpu = torch.device("cpu")
    found = workspace_bytes(
        lambda each: forward(each)[LOSS], cpu, saved, gradients, (of_batch, of_batch)
    )
    for parameter in model.parameters():
        parameter.grad = None
    return [layer.name for layer in graph.layers], saved, gradients, found


def test_what_a_layer_works_in_is_its_own() -> None:
    names, _, _, found = measured(
        chain(), Batch((torch.randn(BATCH, WIDTH),), {}, torch.randn(BATCH, WIDTH))
    )
    spread = names.index("1")
    # The copies and their sum; in the backward the gradient of each copy, and a few activations.
    assert MANY * ROWS <= found[spread] <= (2 * MANY + 8) * ROWS
    assert max(bytes_ for index, bytes_ in enumerate(found) if index != spread) <= 8 * ROWS


@pytest.mark.parametrize(
    ("model", "inputs"),
    [(chain, (BATCH, WIDTH)), (Branches, (BATCH, 3 * 8 * 8))],
    ids=["chain", "branches"],
)
def test_the_peak_of_the_formula_is_that_of_the_allocator(
    model: type[nn.Module], inputs: tuple[int, int]
) -> None:
    """The peak is measured on the plain model, without marks."""
    torch.manual_seed(0)
    plain = model()
    batch = Batch((torch.randn(*inputs),), {}, torch.randn(inputs[0], WIDTH))
    columns = [np.array(each, dtype=np.float64) for each in measured(plain, batch)[1:]]
    saved, gradients, workspaces = columns
    working, _ = working_bytes(saved, gradients, workspaces)
    predicted = saved.sum() + gradients.sum() + working[-1]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(use_kineto=False, profile_memory=True) as recorded:
        step_batch = batch.args[0].clone(), batch.target.clone()
        ((plain(step_batch[0]) - step_batch[1]) ** 2).mean().backward()
    assert recorded.kineto_results is not None
    events = [each for each in recorded.kineto_results.events() if each.name() == "[memory]"]
    sizes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    assert predicted == pytest.approx(max(np.cumsum(sizes)), rel=0.03)


MODEL_FILE = """
import torch
from torch import nn


def build_model():
    return nn.Linear(1000, 1000)


def example_batch(batch_size):
    return (torch.randn(batch_size, 1000),), torch.randn(batch_size, 1000)


def loss(output, target):
    return (output - target).square().mean()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=DECAY)
"""


@pytest.mark.parametrize(("decay", "tensors"), [(0.0, 0), (0.1, 1)])
def test_a_step_with_weight_decay_works_in_a_tensor_of_the_weights_size(
    tmp_path: Path, decay: float, tensors: int
) -> None:
    """In one process, one tensor at a time: gradient and decay are summed in a new tensor."""
    path = tmp_path / "model.py"
    path.write_text(MODEL_FILE.replace("DECAY", str(decay)), encoding="utf-8")
    spec = load_model_file(path)
    linear = spec.build_model()
    for parameter in linear.parameters():
        parameter.grad = torch.ones_like(parameter)
    trained = dict(linear.named_parameters())
    found = update_workspaces(spec, [trained, {"bias": trained["bias"]}, {}], torch.device("cpu"))
    assert found == pytest.approx([tensors * 4 * 1000 * 1000, 0, 0], abs=1000)


SCAN = """
import resource, torch
from planner.profiler.step.allocation import meter_for

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3

def step():
    decay, given = torch.rand(8, 64, 128, 16, requires_grad=True), torch.rand(8, 64, 128, 16)
    state = torch.zeros(8, 128, 16)
    outputs = []
    for t in range(64):
        state = decay[:, t] * state + given[:, t]
        outputs.append(state.sum(-1))
    torch.stack(outputs).mean().backward()

torch.set_num_threads(1)
start = peak_mb()
for _ in range(3):
    step()
plain = peak_mb()
meter = meter_for(torch.device("cpu"))
with meter:
    meter.mark()
    for _ in range(4):
        step()
    meter.mark()
print(plain - start, peak_mb() - plain)
"""


@pytest.mark.skipif(
    not Path("/lib/x86_64-linux-gnu/libc.so.6").exists(), reason="about glibc's malloc"
)
def test_metering_a_scan_takes_no_multiple_of_its_memory() -> None:
    # Each step of the scan frees a tensor of the scan's size, and the profiler's records came to
    # lie in its place.
    run = subprocess.run([sys.executable, "-c", SCAN], capture_output=True, text=True, check=True)
    step_mb, more_mb = map(float, run.stdout.split())
    assert more_mb < 0.5 * step_mb + 30
