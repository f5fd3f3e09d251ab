"""What else the product does with groups: a user's own loop, and the measurement of links."""

from __future__ import annotations

import os
from contextlib import ExitStack
from datetime import timedelta
from unittest.mock import patch

from planner.executor.communication.links import Ahead
from planner.profiler.links import levels
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
    with ExitStack() as patched:
        patched.enter_context(patch.dict(os.environ, LOCAL_WORLD_SIZE=str(workers)))
        for name, few in {"_LATENCY_ROUNDS": 3, "_LEAST_ROUNDS": 3, "_SECONDS": 0.0}.items():
            patched.enter_context(patch.object(levels, name, few))
        return world.run(lambda _: levels.LevelMeasurement(place, timedelta(0), 64, 64).levels())
