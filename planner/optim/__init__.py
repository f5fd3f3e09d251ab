"""Optimizers for gradients that are several updates late; PyTorch optimizers that need nothing of this package."""

from planner.optim.muon import NewestMuon as NewestMuon

__all__ = ["NewestMuon"]
