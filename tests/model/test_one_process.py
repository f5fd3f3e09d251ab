"""Within `as_one_process`, a thread sees neither variables of workers nor a process group; others
see both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from planner.model.one_process import as_one_process
from planner.model.spec import load_model_file
from planner.profiler.step.counters import fake_group


@pytest.fixture(autouse=True)
def _worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "SLURM_PROCID": "1",
        "OF_THE_USER": "5",
    }.items():
        monkeypatch.setenv(name, value)


def in_thread(ask: Callable[[], object]) -> object:
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return answers[0]


def test_variables_of_workers_are_hidden_from_this_thread_alone() -> None:
    whole = os.environ
    with as_one_process():
        assert os.environ.get("WORLD_SIZE") is None
        assert os.getenv("RANK", "0") == "0"
        assert "SLURM_PROCID" not in os.environ.copy()
        assert "RANK" not in os.environ | {"MORE": "1"}
        assert os.environ["OF_THE_USER"] == "5"
        assert in_thread(lambda: os.environ["RANK"]) == "1"
        with pytest.raises(KeyError):
            os.environ["RANK"]
        os.environ["MADE_WITHIN"] = "1"
    assert os.environ is whole
    assert os.environ["RANK"] == "1"
    assert os.environ.pop("MADE_WITHIN") == "1"


def test_a_process_group_is_hidden_from_this_thread_alone() -> None:
    with fake_group(2):
        with as_one_process():
            assert not dist.is_initialized()
            with pytest.raises(ValueError, match="process group has not been initialized"):
                dist.get_world_size()
            assert in_thread(dist.is_initialized)
            assert in_thread(dist.get_world_size) == 2
        assert dist.get_world_size() == 2


def test_threads_take_turns() -> None:
    whole = os.environ
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with as_one_process():
            entered.set()
            leave.wait(60)

    first = threading.Thread(target=hold)
    first.start()
    entered.wait(60)
    threading.Timer(0.05, leave.set).start()
    with as_one_process():
        assert leave.is_set()
    first.join()
    assert os.environ is whole


def test_it_ends_with_an_error() -> None:
    def fail() -> None:
        with as_one_process():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.environ["RANK"] == "1"


# Decides when it is made whether to communicate in forward, as modules with codebooks do.
SYNCHRONISED = """
import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.communicates = dist.is_initialized() and dist.get_world_size() > 1


def build_model():
    return Net()


def example_batch(size):
    return torch.zeros(size, 2), torch.zeros(size, 2)


loss = nn.functional.mse_loss
"""


def test_a_model_is_made_without_a_process_group(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(SYNCHRONISED, encoding="utf-8")
    spec = load_model_file(path)
    with fake_group(2):
        assert not spec.build_model().communicates
        assert spec.functions["build_model"]().communicates
