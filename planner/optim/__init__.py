"""Optimizers for gradients that are several updates late, as those of asynchronous pipelines are.

They are PyTorch optimizers like others, and need nothing of this package:

    from planner.optim import NewestMuon

    optimizer = NewestMuon(model.named_parameters(), lr=2e-3)
"""

from planner.optim.muon import NewestMuon as NewestMuon

__all__ = ["NewestMuon"]
