"""A model whose layers compute little and sleep for their time, on devices that may become slower.

What it trains is real: weights, dropout, an optimizer with state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from tests.executor.plans import make_plan, structural_profile

FORWARD_S = 0.004
WIDTH = 16
BATCH_SIZE = 4
MODEL = """
from pathlib import Path

import torch
from torch import nn

from tests.executor.naps import Nap, read_phases

LAYERS, FORWARD_S, BACKWARD_S, WIDTH, LENGTH = {numbers}
read_phases(Path(__file__).with_name("slow.json"))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return Nap.apply(self.drop(torch.tanh(self.linear(x))), FORWARD_S, BACKWARD_S)

def build_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))

def blocks(model):
    return list(model)

def example_batch(batch_size):
    return (torch.randn(batch_size, LENGTH, WIDTH),), torch.randn(batch_size, LENGTH, WIDTH)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return {samples}

    def __getitem__(self, number):
        drawn = torch.Generator().manual_seed(number)
        sample = torch.randn(LENGTH, WIDTH, generator=drawn)
        return sample, torch.randn(LENGTH, WIDTH, generator=drawn)

def dataset():
    return Samples()
"""


def write_sleeping(
    folder: Path,
    layers: int = 4,
    samples: int = 100_000,
    length: int = 1,
    forward_s: float = FORWARD_S,
) -> Path:
    """Write the model file, whose messages have `length` times 256 bytes; return its path."""
    path = folder / "sleeping.py"
    numbers = f"{layers}, {forward_s}, {2 * forward_s}, {WIDTH}, {length}"
    text = MODEL.replace("{numbers}", numbers).replace("{samples}", str(samples))
    path.write_text(text, encoding="utf-8")
    return path


def slow_down(folder: Path, phases: Sequence[tuple[int, int, int, float]]) -> None:
    """Let devices become slower: (rank, forward of a layer from which on, to before which, times as
    long).
    """
    (folder / "slow.json").write_text(json.dumps(phases), encoding="utf-8")


def slow_now(folder: Path, rank: int, factor: float) -> None:
    """Let the device of a worker be so many times slower until `fast_again`."""
    path = folder / "slow-now.json"
    path.with_suffix(".part").write_text(json.dumps([rank, factor]), encoding="utf-8")
    path.with_suffix(".part").rename(path)


def fast_again(folder: Path) -> None:
    (folder / "slow-now.json").unlink()


def sleeping_profile(path: Path, forward_s: float = FORWARD_S) -> Profile:
    """The profile of the model, with the seconds for which its layers sleep."""
    found = structural_profile(path, BATCH_SIZE)
    layers = [
        layer.model_copy(
            update={"forward_s": forward_s, "backward_s": 2 * forward_s, "update_s": 2e-4}
        )
        for layer in found.layers
    ]
    last = layers[-1]  # the loss, which takes no time
    if not last.parameters:
        layers[-1] = last.model_copy(update={"forward_s": 0.0, "backward_s": 0.0, "update_s": 0.0})
    return found.model_copy(update={"layers": tuple(layers)})


def sleeping_plan(
    profile: Profile,
    replicas: Sequence[int],
    schedule: str = "1f1b-flush",
    microbatches: int = 2,
    cluster: Cluster | None = None,
) -> Plan:
    """The plan with equally many layers per stage."""
    plan = make_plan(profile, replicas, schedule, microbatches)
    return plan.model_copy(update={"cluster": cluster or flat_cluster(plan.workers, 1e9)})
