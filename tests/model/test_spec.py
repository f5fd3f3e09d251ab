"""Model files: what is accepted, and what each mistake is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import ModelFileError
from planner.model.spec import in_memory, load_model_file

GOOD = """
import torch
from torch import nn

def build_model():
    return nn.Linear(4, 2)

def build_wide():
    return nn.Linear(8, 2)

def example_batch(batch_size):
    return (torch.randn(batch_size, 4),), torch.zeros(batch_size, 2)

def loss(output, target):
    return nn.functional.mse_loss(output, target)
"""


def _write(folder: Path, text: str, name: str = "model.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_good_file(tmp_path: Path) -> None:
    file = load_model_file(_write(tmp_path, GOOD))
    assert isinstance(file.build_model(), nn.Linear)
    batch = file.example_batch(3)
    assert batch.size == 3
    assert batch.args[0].shape == (3, 4)
    assert file.loss is not None
    assert file.loss(torch.zeros(3, 2), torch.ones(3, 2)) == 1
    assert file.dataset() is None
    assert not file.defines("optimizer")
    optimizer = file.optimizer(file.build_model().parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["lr"] == 0.01


def test_names(tmp_path: Path) -> None:
    folder = tmp_path / "vgg"
    folder.mkdir()
    path = _write(folder, GOOD)
    assert load_model_file(path).name == "vgg"
    assert load_model_file(f"{path}:build_wide").name == "vgg:build_wide"
    assert load_model_file(_write(tmp_path, GOOD, "net.py")).name == "net"


def test_another_builder(tmp_path: Path) -> None:
    model = load_model_file(f"{_write(tmp_path, GOOD)}:build_wide").build_model()
    assert isinstance(model, nn.Linear)
    assert model.in_features == 8


def test_siblings_can_be_imported_at_once_and_later(tmp_path: Path) -> None:
    for folder, width in (("one", 4), ("two", 8)):
        (tmp_path / folder).mkdir()
        _write(tmp_path / folder, f"WIDTH = {width}\n", f"sibling_{folder}.py")
        late = f"    import sibling_{folder} as late\n    return nn.Linear(WIDTH, late.WIDTH)"
        text = f"from sibling_{folder} import WIDTH\n" + GOOD.replace(
            "    return nn.Linear(4, 2)", late
        )
        model = load_model_file(_write(tmp_path / folder, text)).build_model()
        assert isinstance(model, nn.Linear)
        assert (model.in_features, model.out_features) == (width, width)


def test_a_file_may_define_dataclasses_and_its_own_optimizer(tmp_path: Path) -> None:
    text = GOOD + (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Config:\n    width: int = 4\n"
        "def optimizer(parameters):\n    return torch.optim.AdamW(parameters, lr=0.5)\n"
        "def dataset():\n    return [(torch.zeros(4), torch.zeros(2))] * 3\n"
    )
    file = load_model_file(_write(tmp_path, _with_future_first(text)))
    assert file.defines("optimizer")
    assert isinstance(file.optimizer(file.build_model().parameters()), torch.optim.AdamW)
    dataset = file.dataset()
    assert dataset is not None
    assert len(dataset) == 3  # type: ignore[arg-type]


def _with_future_first(text: str) -> str:
    future = "from __future__ import annotations\n"
    return future + text.replace(future, "")


def test_there_is_no_file() -> None:
    with pytest.raises(ModelFileError, match=r"no model file 'nowhere\.py'"):
        load_model_file("nowhere.py")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def build_model(:\n", ["model.py:1", "SyntaxError"]),
        (
            "\nimport nothing_like_this\n",
            ["model.py:2", "ModuleNotFoundError", "nothing_like_this"],
        ),
        ("x = 1 / 0\n", ["model.py:1", "ZeroDivisionError"]),
        ("", ["has no build_model()"]),
        (GOOD.replace("build_model", "make"), ["has no build_model()"]),
        (GOOD.replace("example_batch", "batch"), ["has no example_batch(batch_size)"]),
        (GOOD + "build_model = 3\n", ["build_model", "cannot be called", "3 is not a callable"]),
        (GOOD + "def loss(output):\n    return output\n", ["loss()", "model.py:16", "2 arguments"]),
        (GOOD + "def build_model(width):\n    return width\n", ["build_model()", "0 arguments"]),
        (GOOD + "optimizer = 'sgd'\n", ["optimizer", "cannot be called", "not a callable"]),
    ],
)
def test_files_that_cannot_be_loaded(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ModelFileError) as caught:
        load_model_file(_write(tmp_path, text))
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "call", "words"),
    [
        ("def build_model():\n    return 3\n", "build_model", ["model.py:16", "returned a int"]),
        (
            "def build_model():\n    raise KeyError('x')\n",
            "build_model",
            ["model.py:17", "KeyError"],
        ),
        (
            "def example_batch(n):\n    return torch.zeros(n, 4)\n",
            "example_batch",
            ["model.py:16", "a Tensor"],
        ),
        ("def example_batch(n):\n    return 1, 2, 3, 4\n", "example_batch", ["a tuple of 4"]),
        (
            "def example_batch(n):\n    return (torch.zeros(8, 4),), None\n",
            "example_batch",
            ["(8, 4)", "not 3"],
        ),
        (
            "def example_batch(n):\n    return torch.zeros(n, 4), torch.zeros(2)\n",
            "example_batch",
            ["(2,)", "not 3"],
        ),
        (
            "def example_batch(n):\n    return (1,), torch.zeros(n)\n",
            "example_batch",
            ["no tensor for the model"],
        ),
        ("def optimizer(p):\n    return None\n", "optimizer", ["returned a NoneType"]),
        ("def dataset():\n    return 3\n", "dataset", ["returned a int"]),
    ],
)
def test_functions_that_return_the_wrong_thing(
    tmp_path: Path, text: str, call: str, words: list[str]
) -> None:
    file = load_model_file(_write(tmp_path, GOOD + text))
    calls = {
        "build_model": file.build_model,
        "example_batch": lambda: file.example_batch(3),
        "optimizer": lambda: file.optimizer([]),
        "dataset": file.dataset,
    }
    with pytest.raises(ModelFileError) as caught:
        calls[call]()
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert caught.value.hint


def test_without_a_loss(tmp_path: Path) -> None:
    assert load_model_file(_write(tmp_path, GOOD.split("def loss")[0])).loss is None


def test_a_model_in_memory() -> None:
    model, example = nn.Linear(4, 2), (torch.arange(8.0).reshape(2, 4), torch.zeros(2, 2))
    spec = in_memory(model, example_batch=example, loss=nn.functional.mse_loss)
    assert (spec.name, spec.origin, spec.path) == ("Linear", "Linear", None)
    assert spec.build_model() is model
    assert spec.example_batch(3).args[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert spec.loss is nn.functional.mse_loss
    assert isinstance(spec.optimizer(model.parameters()), torch.optim.SGD)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            "sgd",
            r"optimizer\(\) of Linear cannot be called with 1 arguments: 'sgd' is not a callable",
        ),
        (lambda: None, r"optimizer\(\) of Linear cannot be called with 1 arguments"),
        (
            lambda parameters: None,
            r"optimizer\(\) of Linear returned a NoneType, not a torch.optim.Optimizer",
        ),
    ],
)
def test_objects_are_checked_like_files(optimizer: Any, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        in_memory(
            nn.Linear(1, 1), example_batch=(torch.ones(1, 1), None), optimizer=optimizer
        ).optimizer([])
