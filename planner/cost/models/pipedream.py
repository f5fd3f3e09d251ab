"""The cost model of PipeDream's published optimizer, to compare against."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.models.published import PublishedModel
from planner.cost.network.placement import Busy
from planner.cost.work import Floats, Work


class PipedreamModel(PublishedModel):
    """PipeDream's published optimizer (optimizer_graph_hierarchical.py, one level).

    stage     (C + 4(r-1)·W / (B·r)) / r
    boundary  2·a / (B·r), with the r of the stage after the cut; also of the stage before it, unless that is the
              first, for which the optimizer leaves it out
    """

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        r = np.asarray(replicas, dtype=np.float64)
        bandwidth = self.link.bandwidth_bytes_per_s
        return {
            "compute": (work.compute_s + 4 * (r - 1) * work.trainable_bytes / (bandwidth * r)) / r,
            "cut_before": 2 * work.cut_before_bytes / (bandwidth * r),
            "cut_after": 2 * self._charged_after(work) / (bandwidth * r),
        }

    def _charged_after(self, work: Work) -> Floats:
        return np.where(work.is_first, 0.0, work.cut_after_bytes)
