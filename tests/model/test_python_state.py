"""Which numbers of Python count as read by the model or loss(), and which are nobody's but the
user's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.model.python_state import Change, PythonState
from planner.model.spec import load_model_file

COMMON = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x):
        return self.a(x)

def build_model():
    return Net()

def example_batch(n):
    return (torch.randn(n, 4),), torch.randint(0, 3, (n,))

def loss(output, target):
    return F.cross_entropy(output, target)
"""
COUNTING = """
MODELS = []

class Counting(Net):
    def __init__(self):
        super().__init__()
        self.epoch = 0

    def name(self):
        return f"epoch-{self.epoch}.pt"

def build_model():
    MODELS[:] = [Counting()]
    return MODELS[0]

def on_update(minibatch, loss, metrics):
    MODELS[0].epoch += 1
"""
TRAINER = """
class Trainer:
    def __init__(self):
        self.step = 0

    def loss(self, output, target):
        return F.cross_entropy(output, target) * self.weight()

    def weight(self):
        return 1.0

    def after(self, minibatch, loss, metrics):
        self.step += 1

trainer = Trainer()
loss, on_update = trainer.loss, trainer.after
"""
LOGGING = """
HISTORY = []

class Logging(Net):
    def log(self, value):
        HISTORY.append(value)

def build_model():
    return Logging()

def on_update(minibatch, loss, metrics):
    HISTORY.append(loss)
"""
CRITERION = """
class Weight:
    def __init__(self):
        self.value = 1.0

    def get(self):
        return self.value

class Criterion:
    def __init__(self):
        self.weight = Weight()

    def __call__(self, output, target):
        return F.cross_entropy(output, target) * self.weight.get()

criterion = Criterion()

def loss(output, target):
    return criterion(output, target)

def on_update(minibatch, loss, metrics):
    criterion.weight.value = 0.5
"""
SAME_NAMES = """
def scaled(x, by=[1.0]):
    return x * by[0]

class Block(nn.Module):
    def forward(self, x, by=[1.0]):
        return x * by[0]

class Net(Net):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, by=[1.0]):
        return self.block(self.a(x)) * by[0]

def build_model():
    return Net()

def on_update(minibatch, loss, metrics):
    Net.forward.__defaults__[0][0] = 0.5
"""


def change(folder: Path, text: str) -> Change | None:
    path = folder / "net.py"
    path.write_text(COMMON + text, encoding="utf-8")
    spec = load_model_file(path)
    state = PythonState(spec, spec.build_model())
    spec.on_update(0, 1.0, {})
    return state.change()


@pytest.mark.parametrize(
    "text",
    [COUNTING, TRAINER, LOGGING],
    ids=["an attribute for a file's name", "a loop around its loss", "a method that logs"],
)
def test_what_no_called_code_reads_may_change(text: str, tmp_path: Path) -> None:
    assert change(tmp_path, text) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (COUNTING.replace("def name(self)", "def forward(self, x)"), "epoch"),
        (
            COUNTING + "def loss(output, target):\n    return MODELS[0].name() and output.sum()\n",
            "MODELS",
        ),
        (
            COUNTING.replace("self.epoch}", "getattr(self, 'epo' + 'ch')}").replace(
                "name", "forward"
            ),
            "epoch",
        ),
        (TRAINER.replace("return 1.0", "return 0.5 ** self.step"), "Trainer().step"),
        (LOGGING.replace("def log(self", "def extra_repr(self"), "HISTORY"),
        (CRITERION, "criterion.weight.value"),
        (SAME_NAMES, "defaults of forward()"),
    ],
    ids=[
        "forward",
        "through loss",
        "by another name",
        "by a method",
        "through a library",
        "held",
        "of one name",
    ],
)
def test_what_called_code_reads_may_not(text: str, name: str, tmp_path: Path) -> None:
    changed = change(tmp_path, text)
    assert changed is not None
    assert changed.name == name
