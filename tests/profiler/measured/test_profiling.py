"""Profiles of small models: the right layers, bytes counted by hand, plausible times."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch

from planner.errors import InputError
from planner.formats.profile import Layer, Profile
from planner.model.spec import load_model_file
from planner.profiler.measured.profiling import ProfilingOptions, profile_model


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")
def test_profile_on_a_gpu() -> None:
    path = Path(__file__).parents[3] / "profiles" / "lstm_lm" / "model.py"
    profile = profile_model(
        load_model_file(f"{path}:build_tiny"), 8, ProfilingOptions(device="cuda", seconds=1.0)
    )
    assert profile.device.kind == "cuda"
    assert profile.whole_step is not None
    layers_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    assert 0 < layers_s < 10 * (profile.whole_step.forward_s + profile.whole_step.backward_s)


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.up = nn.Linear(8, 16)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = self.norm(self.act(self.up(x)))
        return self.head(self.frozen(self.down(y)) + x)

def build_model():
    return Net()

def example_batch(batch_size):
    return torch.randint(0, 32, (batch_size,)), torch.randint(0, 32, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.1)
"""
BATCH = 6
FLOAT = 4


@cache
def _profile(folder: Path) -> Profile:
    path = folder / "net.py"
    path.write_text(MODEL)
    return profile_model(load_model_file(path), BATCH, ProfilingOptions(seconds=0.1, repeats=5))


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return _profile(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def layers(profile: Profile) -> dict[str, Layer]:
    return {layer.name: layer for layer in profile.layers}


def test_layers_in_order(layers: dict[str, Layer]) -> None:
    assert list(layers) == ["embedding", "up", "norm", "down", "frozen", "head", "loss"]
    assert layers["up"].op == "Linear+ReLU"


def test_bytes_of_weights(layers: dict[str, Layer]) -> None:
    assert layers["up"].weight_bytes == (8 * 16 + 16) * FLOAT
    assert layers["up"].gradient_bytes == layers["up"].weight_bytes
    assert layers["frozen"].weight_bytes == (8 * 8 + 8) * FLOAT
    assert layers["frozen"].gradient_bytes == 0
    assert layers["norm"].buffer_bytes == 2 * 16 * FLOAT + 8  # mean, variance, count


def test_tied_weights_count_once(profile: Profile, layers: dict[str, Layer]) -> None:
    assert layers["embedding"].weight_bytes == 32 * 8 * FLOAT
    assert layers["head"].weight_bytes == 0
    assert layers["head"].parameters == ("embedding.weight",)
    assert profile.tied_parameters == (("embedding.weight", "head.weight"),)


def test_bytes_of_optimizer_state(layers: dict[str, Layer]) -> None:
    # Adam: two moments and a step count per parameter.
    assert layers["up"].optimizer_bytes == 2 * layers["up"].weight_bytes + 2 * FLOAT
    assert layers["frozen"].optimizer_bytes == 0
    assert layers["loss"].optimizer_bytes == 0


def test_bytes_that_cross_cuts(profile: Profile, layers: dict[str, Layer]) -> None:
    (value,) = layers["embedding"].outputs
    assert (value.output_bytes, value.gradient_bytes) == (BATCH * 8 * FLOAT, BATCH * 8 * FLOAT)
    assert layers["loss"].outputs == ()
    assert {(edge.source, edge.target) for edge in profile.edges} == {
        *(("embedding", "up"), ("embedding", "frozen"), ("up", "norm"), ("norm", "down")),
        *(("down", "frozen"), ("frozen", "head"), ("head", "loss")),
    }


def test_bytes_saved_for_backward(layers: dict[str, Layer]) -> None:
    assert layers["embedding"].saved_bytes == BATCH * 8  # the tokens, int64
    # "up" saves its input from the embedding, and the in-place ReLU saves its output. "norm" saves
    # the same output, which counts once, and its statistics.
    assert layers["up"].saved_bytes == BATCH * (8 + 16) * FLOAT
    assert layers["norm"].saved_bytes == 2 * 16 * FLOAT
    assert layers["down"].saved_bytes == BATCH * 16 * FLOAT
    # no gradient of its weights, so its input is not needed
    assert layers["frozen"].saved_bytes == 0


def test_times(profile: Profile, layers: dict[str, Layer]) -> None:
    for layer in profile.layers:
        assert layer.forward_s > 0, layer.name
        assert layer.backward_s > 0, layer.name
        assert (layer.update_s > 0) == (layer.gradient_bytes > 0)
        assert all(map(math.isfinite, (layer.forward_s, layer.backward_s, layer.update_s)))
    assert profile.whole_step is not None
    assert sum(layer.update_s for layer in profile.layers) == pytest.approx(
        profile.whole_step.update_s
    )


def test_what_was_measured(profile: Profile) -> None:
    assert profile.model == "net"
    assert profile.microbatch_size == BATCH
    assert profile.dtype == "float32"
    assert profile.device.kind == "cpu"
    assert profile.device.threads == 1
    assert profile.device.memory_bytes
    assert profile.provenance.source == "measured"
    assert profile.provenance.repeats
    assert profile.graph_hash
    assert profile.no_cut_after == ()
    assert profile.optimizer_elementwise


def test_it_is_the_same_graph_as_the_executors(profile: Profile, tmp_path: Path) -> None:
    from planner.model.capture.capture import capture

    path = tmp_path / "net.py"
    path.write_text(MODEL)
    file = load_model_file(path)
    assert capture(file.build_model(), file.example_batch(3), file.loss).hash == profile.graph_hash


def test_more_threads_than_cores_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    with pytest.raises(InputError, match=r"`threads=4000` is more than this machine's \d+ cores"):
        profile_model(load_model_file(path), BATCH, ProfilingOptions(threads=4000))


def test_threads_and_random_state_are_put_back(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    seen: list[tuple[str, float]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        state = torch.get_rng_state()
        profile_model(
            load_model_file(path),
            BATCH,
            ProfilingOptions(threads=1, seconds=0.01),
            progress=lambda phase, done: seen.append((phase, done)),
        )
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert {phase for phase, _ in seen} == {
        "capturing",
        "measuring",
        "measuring updates",
        "measuring again",
    }
    assert all(0 <= done <= 1 for _, done in seen)


@pytest.mark.parametrize(
    ("batch_size", "options", "words"),
    [
        (0, ProfilingOptions(), "`batch_size=0`"),
        (2, ProfilingOptions(threads=0), "`threads=0`"),
        (2, ProfilingOptions(repeats=0), "`repeats=0`"),
        (2, ProfilingOptions(device="gpu"), "`device=gpu` is no kind of device"),
        (2, ProfilingOptions(device="meta"), "`device=meta` is no kind of device"),
        (2, ProfilingOptions(device="cuda:99"), "'cuda:99'"),
    ],
)
def test_numbers_and_devices_that_make_no_sense(
    tmp_path: Path, batch_size: int, options: ProfilingOptions, words: str
) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    with pytest.raises(InputError, match=words):
        profile_model(load_model_file(path), batch_size, options)


def test_thread_times_beside_wall_times(profile: Profile) -> None:
    """On one thread, processor time does not exceed wall time, up to the clocks' resolution."""
    assert profile.whole_step is not None
    whole = profile.whole_step
    assert whole.forward_thread_s is not None
    assert whole.backward_thread_s is not None
    assert 0 < whole.forward_thread_s <= whole.forward_s + 1e-4
    for layer in profile.layers:
        assert layer.forward_thread_s is not None
        assert layer.backward_thread_s is not None
        assert 0 <= layer.forward_thread_s <= layer.forward_s + 1e-3
