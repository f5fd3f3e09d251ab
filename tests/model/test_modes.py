"""Modules train in the modes that the model came with, and say so."""

from __future__ import annotations

import pytest
from torch import nn

from planner.model.modes import evaluating, is_training, put_in_training, warn_of_modes


def _model() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), nn.Dropout(), nn.Sequential(nn.Dropout())
    )


def _modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_what_is_in_evaluation_mode_stays_so(caplog: pytest.LogCaptureFixture) -> None:
    model = _model()
    model[0].eval()
    before = _modes(model)
    put_in_training(model)
    assert _modes(model) == before
    warn_of_modes(model)
    assert "was built with '0' in evaluation mode, and trains so" in caplog.text


def test_evaluation_gives_each_module_its_mode_back() -> None:
    model = _model()
    next(model[0].children()).eval()
    model[2].eval()
    before = _modes(model)
    with evaluating(model):
        assert not is_training(model)
    assert _modes(model) == before
    with pytest.raises(ZeroDivisionError), evaluating(model):
        raise ZeroDivisionError
    assert _modes(model) == before


def test_a_model_in_evaluation_mode_as_a_whole_is_put_into_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As from_pretrained() returns it."""
    model = _model().eval()
    warn_of_modes(model)
    assert "is put into training mode as a whole" in caplog.text
    put_in_training(model)
    assert all(_modes(model))

    # The way out that the warning names.
    for child in (model := _model()).children():
        child.eval()
    put_in_training(model)
    assert _modes(model) == [True, *[False] * (len(_modes(model)) - 1)]


def test_a_head_that_trains_in_a_model_that_does_not() -> None:
    model = _model().eval()
    model[2].train()
    before = _modes(model)
    put_in_training(model)
    assert _modes(model) == before
    assert is_training(model)


class _Frozen(nn.Sequential):
    """Its first part never trains, as BatchNorm in the backbones of detectors."""

    def train(self, mode: bool = True) -> _Frozen:
        super().train(mode)
        self[0].eval()
        return self


def test_train_of_the_model_is_called() -> None:
    model = _Frozen(nn.Dropout(), nn.Linear(2, 2))
    assert model[0].training
    put_in_training(model)
    assert _modes(model) == [True, False, True]


def test_a_train_that_leaves_modules_in_evaluation_mode_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = _Frozen(_model(), nn.Linear(2, 2))
    before = _modes(model)
    warn_of_modes(model)
    assert (
        "train() of _Frozen puts '0' into evaluation mode, where build_model() left it"
        in caplog.text
    )
    assert _modes(model) == before

    # Where build_model() calls train(), the model comes in the modes that it trains in.
    caplog.clear()
    warn_of_modes(_Frozen(_model(), nn.Linear(2, 2)).train())
    assert "train() of" not in caplog.text
    assert "was built with '0' in evaluation mode" in caplog.text


def test_nothing_is_said_of_a_model_that_trains(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_modes(_model())
    assert not caplog.records
