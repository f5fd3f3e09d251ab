"""GNMT with 16 LSTM layers, from planner.demo.gnmt, which has the model for both sizes."""

from torch import nn

from planner.demo.gnmt import GNMT, VOCABULARY, example_batch, loss, optimizer

__all__ = ["build_model", "build_tiny", "example_batch", "loss", "optimizer"]


def build_model() -> nn.Module:
    """Return a model of eight layers in the encoder and eight in the decoder, with random weights."""
    return GNMT(8, 1024, VOCABULARY)


def build_tiny() -> nn.Module:
    """Return a model of the same layers, 32 wide, for experiments."""
    return GNMT(8, 32, VOCABULARY)
