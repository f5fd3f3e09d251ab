"""What else the product does with groups: a user's own loop, and the measurement of links."""

from __future__ import annotations

import os
from datetime import timedelta
from unittest.mock import patch

from planner.executor.communication.links import Ahead
from planner.profiler.links.effort import Effort
from planner.profiler.links.levels import LevelMeasurement
from planner.workers.place import CPU
from tests.executor.device.rules import Recording
from tests.executor.device.runs import (
    PretendedGPUs,
    Run,
    record,
)
from tests.executor.device.world import World


def record_own_loop(run: Run) -> Recording:
    """As `record`, where no worker knows what comes next."""
    with patch.object(Ahead, "look", lambda _: None):
        return record(run)


def record_links(hosts: int, workers: int) -> Recording:
    """Measure the links between the workers of some hosts."""
    place, world = PretendedGPUs(CPU.compute, CPU.wire), World(hosts * workers)
    effort = Effort(
        message_bytes=64, bucket_bytes=64, latency_rounds=3, least_rounds=3, seconds=0.0
    )
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(workers)):
        return world.run(lambda _: LevelMeasurement(place, timedelta(0), effort).levels())
