"""GNMT with 8 LSTM layers: see planner.demo.gnmt, which has the model for both sizes."""

from torch import nn

from planner.demo.gnmt import GNMT, VOCABULARY, example_batch, loss, optimizer

__all__ = ["build_model", "build_tiny", "example_batch", "loss", "optimizer"]


def build_model() -> nn.Module:
    """Four layers in the encoder and four in the decoder, freshly initialised."""
    return GNMT(4, 1024, VOCABULARY)


def build_tiny() -> nn.Module:
    """The same layers, 32 wide, to try things out."""
    return GNMT(4, 32, VOCABULARY)
