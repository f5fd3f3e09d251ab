"""Choose how a worker's messages are posted: it depends on what a posted receive is for the backend."""

from __future__ import annotations

from collections.abc import Callable

from planner.devices.groups import GLOO
from planner.devices.place import Place
from planner.executor.communication.groups import LinkGroups
from planner.executor.communication.links import LayoutOf, Links, Segments, SendLimits
from planner.executor.communication.posted_ahead import PostedAhead
from planner.executor.communication.posted_in_runs import PostedInRuns


def connect(
    groups: LinkGroups,
    layout_of: LayoutOf,
    limits: SendLimits,
    place: Place,
    instructions: Callable[[], Segments],
) -> Links:
    """Return the worker's links.

    Args:
        place: the device that messages are made on, and the device that computes with their values.
        instructions: returns a new iterator over the worker's stream by segments, as far as it is known.
    """
    kind = PostedAhead if place.backend == GLOO else PostedInRuns
    return kind(groups, layout_of, limits, place, instructions)
