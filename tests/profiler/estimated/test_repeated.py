"""Large mixtures of which few equal blocks are read: the same profile as with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.formats.profile import Profile
from planner.model.capture.spared_blocks import SparedBlocks, spare_blocks
from planner.model.spec import load_model_file
from planner.profiler.estimated.estimate import EstimateOptions, Estimator

MODEL = '''
import torch
from torch import nn

WIDTH, BLOCKS, EXPERTS = 16, 12, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH))

    def forward(self, x):
        return torch.einsum("bef,efw->bw", torch.einsum("bw,ewf->bef", x, self.up), self.down)


class Block(nn.Module):
    """The first has no experts; each second one has a narrow product."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        inner = WIDTH // 2 if number % 2 else WIDTH
        self.first, self.second = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.experts = Experts() if number else nn.Linear(WIDTH, WIDTH)

    def forward(self, x, place):
        made = self.second(torch.tanh(self.first(x + place)))
        return x + self.experts(made)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.place, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(Block(number) for number in range(BLOCKS))
        RESHAPE

    def forward(self, x):
        place = torch.sin(self.place(x))
        known = x
        for layer in self.layers:
            x, before = layer(x, place), x
            SKIP
        return self.head(x)


def build_model():
    return Model()


def example_batch(size):
    return (torch.randn(size, WIDTH),), {}, torch.randint(0, 4, (size,))


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters)
'''


def estimator(folder: Path, *, spares: bool, reshape: str = "", skip: str = "") -> Estimator:
    path = folder / "model.py"
    path.write_text(MODEL.replace("RESHAPE", reshape).replace("SKIP", skip), encoding="utf-8")
    options = EstimateOptions("h100", "bfloat16", master_weights=True, spares_blocks=spares)
    return Estimator(load_model_file(path), options)


def captured(profile: Profile) -> dict[str, Any]:
    """Return what a profile says of its layers and edges, with values by their rank."""
    ranks = {
        (layer.name, value.name): rank
        for layer in profile.layers
        for rank, value in enumerate(layer.outputs)
    }
    times = {"forward_s", "backward_s", "update_s", "accumulate_s", "weight_share"}
    layers = []
    for layer in profile.layers:
        own = layer.model_dump(exclude=times)
        for value in own["outputs"]:
            del value["name"]
        layers.append(own)
    edges = [(edge.source, ranks[edge.source, edge.value], edge.target) for edge in profile.edges]
    return {"layers": layers, "edges": edges}


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve blocks are as many as 33 are otherwise."""
    monkeypatch.setattr("planner.model.capture.spared_blocks.FEWEST_BLOCKS", 12)


def test_the_profile_is_that_of_all_blocks(tmp_path: Path) -> None:
    few = estimator(tmp_path, spares=True).profile(2)
    every = estimator(tmp_path, spares=False).profile(2)
    assert captured(few) == captured(every)
    for one, other in zip(few.layers, every.layers, strict=True):
        # where the host is slower than the device, the sums of all layers share the difference
        assert one.forward_s == pytest.approx(other.forward_s, rel=0.02)
        assert one.backward_s == pytest.approx(other.backward_s, rel=0.02)
    assert every.trainable
    assert not few.trainable
    values = [value.name for layer in few.layers for value in layer.outputs]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize(
    ("reshape", "skip"),
    [
        ("self.layers[8].number = 99", ""),
        ("self.layers[8].first.bias.requires_grad_(False)", ""),
        ("self.layers[8].experts = self.layers[6].experts", ""),
        ("", "x = x + known if layer.number == 11 else x"),
        ("", "known = before if layer.number == 3 else known; x = x + known"),
    ],
)
def test_other_models_are_read_whole(tmp_path: Path, reshape: str, skip: str) -> None:
    few = estimator(tmp_path, spares=True, reshape=reshape, skip=skip).profile(2)
    every = estimator(tmp_path, spares=False, reshape=reshape, skip=skip).profile(2)
    assert captured(few) == captured(every)


def test_whole_turns_are_left_out() -> None:
    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            self.window = 8 if number % 3 else None  # also the number of a block
            self.experts = nn.Parameter(torch.empty(2, 2, 2, device="meta"))

    model = nn.Sequential()
    model.add_module("blocks", nn.ModuleList(Block(number) for number in range(40)))
    found = spare_blocks(model)
    assert found == SparedBlocks("blocks", blocks=40, start=6, count=33, turn=3)
    blocks = list(model.get_submodule("blocks").children())
    assert [block.number for block in blocks] == [0, 1, 2, 3, 4, 5, 39]
    assert [found.kept_as(number) for number in range(6, 40)] == [*([3, 4, 5] * 11), 6]

    few = nn.Sequential()
    few.add_module("blocks", nn.ModuleList(Block(number) for number in range(11)))
    assert spare_blocks(few) is None
    dense = nn.Sequential()
    dense.add_module("blocks", nn.ModuleList(nn.Linear(2, 2) for _ in range(40)))
    assert spare_blocks(dense) is None
