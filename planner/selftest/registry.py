"""All checks, in the order in which they run. A new one is a file in `checks/`, and a line here."""

from __future__ import annotations

from planner.selftest.checks import (
    cuts,
    environment,
    failures,
    links,
    memory,
    throughput,
    times,
    training,
)
from planner.selftest.rows import Check

CHECKS: tuple[Check, ...] = (
    environment.CHECK,
    links.CHECK,
    cuts.CHECK,
    training.CHECK,
    times.CHECK,
    memory.CHECK,
    throughput.CHECK,
    failures.CHECK,
)
