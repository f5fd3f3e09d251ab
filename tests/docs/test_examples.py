"""The examples in the documentation run."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import torch

from planner.model.capture.capture import capture
from planner.model.spec import load_model_file

DOCS = Path(__file__).resolve().parents[2] / "docs"
OPERATIONS = ("Conv2d", "ReLU", "MaxPool2d", "Flatten", "Linear", "ReLU", "Linear")


def example(page: str, heading: str) -> str:
    """The first indented block below `heading`."""
    text = (DOCS / page).read_text(encoding="utf-8").split(f"# {heading}\n")[1]
    block = re.search(r"^    .*\n(?:    .*\n|\n)*", text, re.MULTILINE)
    assert block is not None
    return textwrap.dedent(block[0])


def test_the_complete_model_file_can_be_captured(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(example("guides/own-model.md", "Your own model"), encoding="utf-8")
    file = load_model_file(path)
    graph = capture(file.build_model(), file.example_batch(4), file.loss)
    assert [layer.op for layer in graph.layers] == [*OPERATIONS, "loss"]
    assert isinstance(file.optimizer(file.build_model().parameters()), torch.optim.SGD)


def test_the_loop_for_transformers_is_the_examples() -> None:
    """Which a test runs where transformers is installed."""
    source = (DOCS / "examples" / "fine_tune.py").read_text(encoding="utf-8")
    page = "guides/transformers.md"
    assert textwrap.indent(example(page, "The loop"), "    ").rstrip() in source
    assert example(page, "Weights from local safetensors").rstrip() in source
    source = (DOCS / "examples" / "lightning_loop.py").read_text(encoding="utf-8")
    assert example("guides/trainer.md", "Lightning").rstrip() in source
