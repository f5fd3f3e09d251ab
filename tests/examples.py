"""How many examples Hypothesis draws in one test."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """Return a sixth of `count`, or all where the environment has ALL_EXAMPLES, as `.ci/run --slow`
    does.
    """
    return count if os.environ.get("ALL_EXAMPLES") else count // 6
