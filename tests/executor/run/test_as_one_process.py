"""Models with frozen parts, regions and hooks train in two stages as one plain process does, to the
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from planner.errors import CaptureError
from planner.model.spec import load_model_file
from planner.options.training import TrainingOptions
from tests.executor import eager
from tests.executor.eager import Case
from tests.executor.plans import make_plan, structural_profile

SIZE, STEPS = 8, 6

COMMON = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def example_batch(n):
    return (torch.randn(n, 6),), torch.randint(0, 3, (n,))

def loss(output, target):
    return nn.functional.cross_entropy(output.float(), target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

def dataset():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(
        3 * torch.randn(48, 6, generator=g) + 1, torch.randint(0, 3, (48,), generator=g)
    )

def evaluation_dataset():
    return dataset()

class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        block = lambda d_in: [nn.Linear(d_in, d), nn.BatchNorm1d(d), nn.ReLU(), nn.Dropout(DROPOUT)]
        self.encoder = nn.Sequential(*block(6), *block(d), *block(d))
        self.head = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 3))

    def forward(self, x):
        return self.head(self.encoder(x))
"""

MODELS = {
    "frozen, in evaluation mode": """
DROPOUT = 0.5

def build_model():
    net = Net()
    net.encoder.requires_grad_(False)
    net.encoder.eval()
    return net
""",
    "norms frozen by train()": """
DROPOUT = 0.0

class Frozen(Net):
    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self

def build_model():
    return Frozen().train()
""",
    "autocast around forward": """
DROPOUT = 0.0

class Lower(Net):
    forward = torch.autocast("cpu", torch.bfloat16)(Net.forward)

def build_model():
    return Lower()
""",
    "a backbone without gradients": """
DROPOUT = 0.0

class Backbone(Net):
    def forward(self, x):
        with torch.no_grad():
            x = self.encoder(x)
        return self.head(x)

def build_model():
    net = Backbone()
    net.encoder.requires_grad_(False)
    return net
""",
    "no gradients in autocast": """
DROPOUT = 0.0

class Both(Net):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x):
        with torch.no_grad():
            x = self.encoder(x)
        return self.head(x)

def build_model():
    return Both()
""",
    "a mask on a gradient": """
DROPOUT = 0.0

def build_model():
    net = Net()
    keep = torch.zeros(16, 1)
    keep[:4] = 1
    net.encoder[4].weight.register_hook(lambda gradient: gradient * keep)
    return net
""",
    "features in attributes": """
DROPOUT = 0.0

class Features(Net):
    def __init__(self):
        super().__init__()
        self.features = [torch.zeros(1)]

    def forward(self, x):
        for number, layer in enumerate(self.encoder):
            x = layer(x)
            if number == 3:
                self.features[0] = x
        return self.head(x + self.features[0])

def build_model():
    return Features()
""",
    "gradients clipped by a step hook": """
DROPOUT = 0.0

def optimizer(parameters):
    made = torch.optim.SGD(parameters, lr=0.1)

    def clip(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.01, 0.01)

    made.register_step_pre_hook(clip)
    return made

def build_model():
    return Net()
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


USUAL = (
    "frozen, in evaluation mode",
    "no gradients in autocast",
    "a mask on a gradient",
    "gradients clipped by a step hook",
)


@pytest.mark.parametrize(
    "names",
    [
        USUAL,
        pytest.param([name for name in MODELS if name not in USUAL], marks=pytest.mark.slow),
    ],
    ids=["some", "others"],
)
def test_two_stages_train_as_one_process_to_the_bit(names: Sequence[str], folder: Path) -> None:
    """With evaluation in between, which gives the modes back."""
    cases = []
    for number, name in enumerate(names):
        text = MODELS[name]
        path = folder / f"model_{number}.py"
        path.write_text(COMMON + text, encoding="utf-8")
        plan = make_plan(structural_profile(path, SIZE), (1, 1), "1f1b-flush")
        assert all(len(stage.layers) > 1 for stage in plan.stages)
        cases.append(Case(path, plan, TrainingOptions(evaluate_every=2), STEPS))

    for name, case, (result, weights) in zip(names, cases, eager.run_cases(cases), strict=True):
        spec = load_model_file(case.path)
        model = eager.build(spec)
        losses = eager.train(spec, model, eager.minibatches(spec, SIZE, 1)[:STEPS])
        assert [entry.loss for entry in result.losses] == losses, name
        for key, tensor in model.state_dict().items():
            assert torch.equal(weights[key], tensor), (name, key)
        if name == "frozen, in evaluation mode":
            assert torch.equal(weights["encoder.1.running_mean"], torch.zeros(16))


HOOKED = """
DROPOUT = 0.0

class Hooked(Net):
    def forward(self, x):
        x = self.encoder(x)
        if x.grad_fn is not None:
            x.grad_fn.register_hook(
                lambda inputs, _: tuple(None if each is None else -each for each in inputs)
            )
        return self.head(x)

def build_model():
    return Hooked()
"""


@pytest.mark.parametrize("defers", [False, True])
def test_training_from_an_estimate_compares_the_captured_layers(
    defers: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An estimate runs nothing, so that only a training sees what the tracer dropped."""
    from planner.executor.run.stages import build_modules
    from planner.workers.job import Job

    path = folder / "hooked.py"
    path.write_text(COMMON + HOOKED, encoding="utf-8")
    plan = make_plan(structural_profile(path, SIZE), (1, 1))
    assert not plan.capture_checked
    job = Job(model=str(path), plan=plan, steps=1, seed=0, defer_weights=defers)
    spec = load_model_file(path)
    build_modules(job, [1], spec, "cpu")  # a worker of the first stage does it
    if defers:
        build_modules(job, [0], spec, "cpu")
        assert (
            "the captured layers are not compared with the model: no worker has all weights"
            in caplog.text
        )
        return

    with pytest.raises(
        CaptureError, match="equal losses, but other gradients of parameter 'encoder"
    ):
        build_modules(job, [0], spec, "cpu")
    checked = job.model_copy(update={"plan": plan.model_copy(update={"capture_checked": True})})
    build_modules(checked, [0], spec, "cpu")
