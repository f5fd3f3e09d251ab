"""The formulas of synchronous schedules, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import Link
from planner.schedule.one_stage import FLUSH, GPIPE
from tests.cost.works import EXAMPLE


def test_synchronous_models() -> None:
    gpipe = SynchronousModel(Link(10.0, 0.5), GPIPE, 7)
    assert gpipe.sum_s(EXAMPLE)[0] == pytest.approx(2 + 4 + (30 + 20) / 10 / 2 + 3 * 0.5 / 2)
    # Three replicas take 3, 2 and 2 microbatches; five sixths of the backward of 4 s hide in the
    # all-reduce of 10 s.
    assert gpipe.resources_s(EXAMPLE, 3)["compute"][0] == pytest.approx(2 * 6 + (10 - 4) + 1)
    assert gpipe.resources_s(EXAMPLE, 3)["receive"][0] == pytest.approx(2 * 4 + (10 - 4) + 1)
    assert list(gpipe.in_flight(np.array([1, 3, 7]), 0)) == [7, 3, 1]
    flush = SynchronousModel(Link(10.0, 0.5), FLUSH, 7)
    # as 1f1b, but no more than there are
    assert list(flush.in_flight(np.array([1, 3, 7]), 4)) == [5, 3, 1]
    adding = replace(EXAMPLE, accumulate_s=np.array([2.0]))
    # All but the first of three add to gradients, and the all-reduce hides behind the last of them.
    assert gpipe.resources_s(adding, 3)["compute"][0] == pytest.approx(2 * (6 + 2) + (10 - 6) + 1)
    assert gpipe.resources_s(adding, 7)["compute"] == gpipe.resources_s(EXAMPLE, 7)["compute"]
    assert gpipe.sum_s(adding) == gpipe.sum_s(EXAMPLE)
