"""Graphs of models whose batches differ in length, and what of a model pins a length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import nn

from planner.errors import CaptureError, ModelFileError
from planner.model.capture.capture import capture_file
from planner.model.capture.size import BATCH, extent_told, length_symbol, telling
from planner.model.lengths import Length, extent_of
from planner.model.spec import in_memory, load_model_file
from planner.model.stage.parts import COMPILED
from planner.model.stage.stage import build_stage

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(9, 8), nn.Parameter(torch.randn(1, 20, 8))
        self.lstm, self.gru = (
            nn.LSTM(8, 6, batch_first=True, bidirectional=True),
            nn.GRU(12, 8, batch_first=True),
        )
        self.head = nn.Linear(8, 9)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place[:, : tokens.shape[1]]
        x, (state, _) = self.lstm(x)
        x, _ = self.gru(x + state.mean())
        BODY
        return self.head(x)

def build_model():
    return Net()

def lengths():
    return {"words": (3, 20)}

def example_batch(batch_size, words=20):
    tokens = torch.randint(0, 9, (batch_size, words + 1))
    return (tokens[:, :-1],), tokens[:, 1:]

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""


def write(folder: Path, body: str = "") -> Path:
    path = folder / "model.py"
    path.write_text(MODEL.replace("BODY", body), encoding="utf-8")
    return path


@pytest.mark.parametrize("samples", [1, 4])
def test_stages_of_one_capture_compute_every_length(samples: int, tmp_path: Path) -> None:
    spec = load_model_file(str(write(tmp_path)))
    graph = capture_file(spec, spec.example_batch(samples))
    assert graph.lengths == (Length(0, 1, 3, 20), Length(1, 1, 3, 20))  # inputs and labels
    half = len(graph.layers) // 2
    names = [layer.name for layer in graph.layers]
    first, second = build_stage(graph, names[:half]), build_stage(graph, names[half:])
    assert spec.loss is not None
    for words in (3, 7, 20):
        batch = spec.example_batch(samples, {"words": words})
        extent = first.extent(batch)
        assert extent == (samples, words, words)
        values = first(batch, {})
        for value in first.sent:
            assert tuple(values[value.name].shape) == value.shape(extent)
        loss = second(batch, {value.name: values[value.name] for value in second.received})["loss"]
        expected = spec.loss(graph.model(*batch.args), batch.target)
        torch.testing.assert_close(loss, expected)


def test_the_hash_does_not_depend_on_the_batch_but_on_the_lengths(tmp_path: Path) -> None:
    spec = load_model_file(str(write(tmp_path)))
    hashes = {
        capture_file(spec, spec.example_batch(size, {"words": words})).hash
        for size, words in ((2, 20), (3, 9))
    }
    assert len(hashes) == 1
    path = write(tmp_path)
    path.write_text(
        path.read_text(encoding="utf-8").replace("(3, 20)", "(3, 19)"), encoding="utf-8"
    )
    other = load_model_file(str(path))
    assert capture_file(other, other.example_batch(2)).hash not in hashes


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("x = x * 2 if tokens.shape[1] > 10 else x", "x = x * 2 if"),
        ("x = x + torch.ones(20)[:, None]", "x = x + torch.ones"),
        (
            "x = x.view(-1, 4 * tokens.shape[1] // 4, 8)[:, :20] if x.shape[1] % 2 == 0 else x",
            "x = x.view",
        ),
    ],
)
def test_what_pins_a_length_is_named_with_its_place(body: str, line: str, tmp_path: Path) -> None:
    path = write(tmp_path, body)
    number = next(
        n for n, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if line in text
    )
    spec = load_model_file(str(path))
    with pytest.raises(
        CaptureError, match=rf"Net does not compute the same .* words \d+, at .*model.py:{number}\n"
    ):
        capture_file(spec, spec.example_batch(2))


def test_lengths_that_example_batch_does_not_follow(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace("words + 1)", "21)"), encoding="utf-8")
    spec = load_model_file(str(path))
    with pytest.raises(ModelFileError, match="returns the same shapes for every length 'words'"):
        capture_file(spec, spec.example_batch(2))


@pytest.mark.parametrize(
    "wrong", ['{"words": (5, 5)}', '{"words": 5}', '{"a b": (1, 2)}', "(3, 4)"]
)
def test_lengths_that_are_none(wrong: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(
        path.read_text(encoding="utf-8").replace('{"words": (3, 20)}', wrong), encoding="utf-8"
    )
    with pytest.raises(ModelFileError, match=r"lengths\(\) at .* returned .*, not a dict of names"):
        load_model_file(str(path)).lengths()


def test_blocks_are_of_one_length(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(
        path.read_text(encoding="utf-8") + "\ndef blocks(model):\n    return [model]\n",
        encoding="utf-8",
    )
    spec = load_model_file(str(path))
    with pytest.raises(CaptureError, match=r"has lengths\(\) and blocks\(\)"):
        capture_file(spec, spec.example_batch(2))


def test_a_model_in_memory() -> None:
    def example(batch_size: int, steps: int) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        return (torch.randn(batch_size, steps, 4),), torch.zeros(batch_size, steps, 2)

    model = nn.Linear(4, 2)
    spec = in_memory(
        model, example_batch=example, loss=nn.functional.mse_loss, lengths={"steps": (2, 9)}
    )
    graph = capture_file(spec, spec.example_batch(3))
    assert extent_of(spec.example_batch(3), graph.lengths) == (3, 9)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert len({spec.random_batch(3).args[0].shape for _ in range(20)}) > 3


def test_sizes_tell_lengths() -> None:
    length, other = length_symbol(0), length_symbol(1)
    sizes = (7, BATCH * length, other + length - 1, 2 * BATCH, sympy.floor(other / 2))
    assert telling(sizes) == {BATCH: 3, length: 1, other: 2}
    assert extent_told(sizes, (7, 15, 9, 6, 2), 2) == (3, 5, 5)
    assert extent_told((7, 2 * BATCH), (7, 6), 0) == 3
    assert extent_told((7, length + other), (7, 6), 2) == (0, 0, 0)


@pytest.mark.filterwarnings("ignore")  # those of the compiler are not ours
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_is_for_all_lengths(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs are those of either backend; "inductor" compiles C++ from them, for 12 s."""
    compile_code = torch.compile

    def compiled(code: Callable[..., object], **options: Any) -> object:
        return compile_code(code, dynamic=options["dynamic"], backend=backend)

    if backend != "inductor":
        monkeypatch.setattr("torch.compile", compiled)
    path = tmp_path / "model.py"
    source = MODEL.replace("BODY", "").replace(
        "x, (state, _) = self.lstm(x)", "x = torch.cat([x, x[..., :4]], -1)"
    )
    path.write_text(
        source.replace("x, _ = self.gru(x + state.mean())", "x = x[..., 4:]"), encoding="utf-8"
    )
    spec = load_model_file(str(path))
    graph = capture_file(spec, spec.example_batch(2))
    stage = build_stage(graph, [layer.name for layer in graph.layers], variant=COMPILED)
    torch._dynamo.utils.counters.clear()
    assert spec.loss is not None
    for words in (20, 3, 9, 14):
        batch = spec.example_batch(2, {"words": words})
        torch.testing.assert_close(
            stage(batch, {})["loss"], spec.loss(graph.model(*batch.args), batch.target)
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
