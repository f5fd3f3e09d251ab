"""The max-load objective: a device is busy with its layers and with the values that it sends and receives, in turn.

Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from planner.cost.asynchronous import Link
from planner.cost.layer_costs import Candidate, Ledger, Traffic
from planner.cost.plan_price import Price, stage_memory
from planner.formats.plan import Bottleneck
from planner.formats.profile import Layer


def price_loads(ledger: Ledger, stages: Sequence[Candidate], link: Link) -> Price:
    """The price under `max-load`: every stage holds what it holds once."""
    bottleneck, memory, crossing_bytes = Bottleneck(stage=0, resource="compute", busy_s=0.0), [], 0
    for number, stage in enumerate(stages):
        moved = ledger.moved(stage.layers)
        free = stage.kind is not None and not stage.kind.pays_transfers
        moved_s = 0.0 if free else sum(value_load_s(value, link) for value in moved)
        moved_bytes = sum(value.output_bytes + value.gradient_bytes for value in moved)
        compute_s = float(ledger.work(stage).compute_s)
        if moved_s + compute_s > bottleneck.busy_s:
            resource: Literal["compute", "link"] = "compute" if compute_s >= moved_s else "link"
            bottleneck = Bottleneck(stage=number, resource=resource, busy_s=moved_s + compute_s)
        held = ledger.footprint(stage)
        footprint = replace(held, message_bytes=np.float64(moved_bytes), working_bytes=np.asarray(0.0))
        memory.append(stage_memory(footprint, 1, 1))
        crossing_bytes += sum(
            value.output_bytes + value.gradient_bytes for value in moved if value.producer not in stage.layers
        )
    return Price(bottleneck.busy_s, bottleneck, (1,) * len(stages), tuple(memory), float(crossing_bytes))


def held_bytes(layer: Layer) -> int:
    """What a layer adds to its device's memory under `max-load`."""
    fixed = layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes + layer.buffer_bytes
    return fixed + layer.saved_bytes


def value_load_s(value: Traffic, link: Link) -> float:
    """Seconds that a value, with its gradient, adds to the load of each device that it leaves or enters."""
    messages = 1 + (value.gradient_bytes > 0)
    return (value.output_bytes + value.gradient_bytes) / link.bandwidth_bytes_per_s + messages * link.latency_s
