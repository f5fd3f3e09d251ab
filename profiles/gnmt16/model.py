"""GNMT with 16 LSTM layers: the model of the folder beside this one, twice as deep."""

from pathlib import Path

from torch import nn

from planner.model.spec import import_file

GNMT8 = import_file(Path(__file__).resolve().parents[1] / "gnmt8" / "model.py")
example_batch, loss, optimizer = GNMT8.example_batch, GNMT8.loss, GNMT8.optimizer


def build_model() -> nn.Module:
    """Return eight layers in the encoder and eight in the decoder, with random weights."""
    model: nn.Module = GNMT8.GNMT(8, 1024, GNMT8.VOCABULARY)
    return model


def build_tiny() -> nn.Module:
    """Return a model of the same layers, 32 wide, for experiments."""
    model: nn.Module = GNMT8.GNMT(8, 32, GNMT8.VOCABULARY)
    return model
