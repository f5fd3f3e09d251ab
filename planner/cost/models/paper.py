"""The cost model of the PipeDream paper, to compare against."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.models.published import PublishedModel
from planner.cost.network.placement import Busy
from planner.cost.work import Work


class PaperModel(PublishedModel):
    """The equation of the SOSP 2019 paper (section 3.1): stage max(C, 2(r-1)·W/B) / r, boundary 2·a / B."""

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        r = np.asarray(replicas, dtype=np.float64)
        bandwidth = self.link.bandwidth_bytes_per_s
        return {
            "compute": np.maximum(work.compute_s, 2 * (r - 1) * work.trainable_bytes / bandwidth) / r,
            "cut_before": 2 * work.cut_before_bytes / bandwidth + 0 * r,
        }
