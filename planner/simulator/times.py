"""What computations take besides the layers' own time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cost import Link
from planner.plan_file import Transfer
from planner.simulator.engine import StageTimes


def with_handling(times: StageTimes, stage: int, transfers: Sequence[Transfer], link: Link) -> StageTimes:
    """Where messages do not travel while a device computes, handling them is its processor's work."""
    own = [transfer for transfer in transfers if stage in (transfer.source, transfer.target)]
    return replace(
        times,
        forward_s=times.forward_s + float(link.handling_s(sum(transfer.output_bytes for transfer in own))),
        backward_s=times.backward_s + float(link.handling_s(sum(transfer.gradient_bytes for transfer in own))),
    )
