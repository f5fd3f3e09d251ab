"""Bounds of the published cost models."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.models.paper import PaperModel
from planner.cost.models.pipedream import PipedreamModel
from planner.cost.rounding import SLACK
from planner.cost.work import IMPOSSIBLE, Floats, Work
from planner.solver.bounds.bounds import Bounds, larger_root


class PipedreamBounds(PipedreamModel, Bounds):
    """See `PipedreamModel` for the formulas."""

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        bandwidth = self.link.bandwidth_bytes_per_s
        ring_s = 4 * work.trainable_bytes / bandwidth
        cuts = 2 * np.maximum(work.cut_before_bytes, self._charged_after(work)) / bandwidth
        stage = larger_root(target_s, work.compute_s + ring_s, ring_s)
        return [np.maximum(np.maximum(stage, cuts / target_s), work.compute_s / target_s)]

    def additive_s(self, work: Work, replicas: int) -> list[Floats]:
        """Return all of the stage's term."""
        bandwidth = self.link.bandwidth_bytes_per_s
        return [work.compute_s + 4 * (replicas - 1) * work.trainable_bytes / (bandwidth * replicas)]

    def cut_within(self, output_bytes: Floats, replicas: int, target_s: float) -> NDArray[np.bool_]:
        """Return whether the boundary's term is within the target."""
        return 2 * output_bytes / (self.link.bandwidth_bytes_per_s * replicas) * (1 - SLACK) <= target_s

    def fewest_around_cut(self, output_bytes: Floats, gradient_bytes: Floats, target_s: float) -> tuple[Floats, Floats]:
        """Return the replicas of the stage after the cut; the one before may be the first, which is not charged."""
        after = np.ceil(2 * output_bytes / (self.link.bandwidth_bytes_per_s * target_s) * (1 - SLACK))
        return np.ones_like(after), after


class PaperBounds(PaperModel, Bounds):
    """See `PaperModel` for the formulas."""

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        # The all-reduce's share grows with r here, so the fewest replicas that compute in time are the only hope.
        return [np.asarray(work.compute_s / target_s)]

    def additive_s(self, work: Work, replicas: int) -> list[Floats]:
        """Return both sides of the stage's maximum."""
        if replicas == 1:
            return [work.compute_s]
        return [work.compute_s, 2 * (replicas - 1) * work.trainable_bytes / self.link.bandwidth_bytes_per_s]

    def fewest_around_cut(self, output_bytes: Floats, gradient_bytes: Floats, target_s: float) -> tuple[Floats, Floats]:
        """Return 1 GPU or `IMPOSSIBLE` after the cut: replicas do not help."""
        within = 2 * output_bytes / self.link.bandwidth_bytes_per_s <= target_s
        return np.ones_like(output_bytes), np.where(within, 1.0, float(IMPOSSIBLE))
