"""The max-load objective: a device is busy with its layers and with the values that it sends and
receives, in turn.

A device's load is F + Bw + U of its layers plus, for every distinct value that enters or leaves it,
the bytes of the value and of its gradient divided by the bandwidth, and the latency per message. A
plan has one device per stage, and its time is its largest load. No schedule runs such a plan:
nothing says how many minibatches are in flight.

Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
    NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.candidate import Candidate, Traffic
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Link, link_of
from planner.errors import InputError
from planner.formats.cluster import DeviceKind
from planner.formats.profile import Layer
from planner.schedule.instructions import POSTED
from planner.solver.problem.problem import Problem


class Host(DeviceKind):
    """A kind of device whose transfers take none of its time, like the CPUs of the published
    workloads.
    """


@dataclass(frozen=True)
class LoadProblem(Problem):
    """A problem on a cluster of one level, for the plan whose largest load is smallest."""

    def __post_init__(self) -> None:
        """Refuse clusters of several levels.

        Raises:
            InputError: saying how many levels.
        """
        if len(self.cluster.joined) > 1:
            raise InputError(
                f"the max-load objective prices clusters of one level, not of "
                f"{len(self.cluster.joined)}",
                hint="give the bandwidth of the slowest level",
            )

    @property
    def relaxed_s(self) -> float:
        """Time of perfect balance without communication, which no plan beats."""
        speeds = sum(kind.count * kind.speed for kind in self.cluster.kinds) or self.cluster.gpus
        return sum(compute_s(layer) for layer in self.layer_costs.profile.layers) / speeds

    @property
    def memory_matters(self) -> bool:
        """Whether some device could not hold the whole model and all that it moves."""
        limits = [self.cluster.memory_of(kind) for kind in self.kinds]
        moved = sum(value.output_bytes + value.gradient_bytes for value in self.layer_costs.traffic)
        most = sum(held_bytes(layer) for layer in self.layer_costs.profile.layers) + POSTED * moved
        return any(limit is not None and limit < most for limit in limits)

    def load(self, stage: Candidate) -> tuple[float, int]:
        """Return the seconds that the stage's device is busy, and the bytes that it holds."""
        link, layers = (
            link_of(self.cluster),
            [self.layer_costs.profile.layers[index] for index in stage.layers],
        )
        moved = moved_values(self.layer_costs, stage.layers)
        moved_s = (
            0.0
            if isinstance(stage.options.kind, Host)
            else sum(value_load_s(value, link) for value in moved)
        )
        moved_bytes = sum(value.output_bytes + value.gradient_bytes for value in moved)
        speed = 1.0 if stage.options.kind is None else stage.options.kind.speed
        busy_s = sum(compute_s(layer) for layer in layers) / speed + moved_s
        return busy_s, sum(held_bytes(layer) for layer in layers) + POSTED * moved_bytes

    def longest_s(self, stages: Sequence[Candidate]) -> float:
        """Return the largest load of these stages."""
        return max(self.load(stage)[0] for stage in stages)


def compute_s(layer: Layer) -> float:
    """Return the seconds that a layer takes on the profiled device."""
    return layer.forward_s + layer.backward_s + layer.update_s


def held_bytes(layer: Layer) -> int:
    """Return what a layer adds to its device's memory: everything once, as if one minibatch were in
    flight.
    """
    fixed = layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes + layer.buffer_bytes
    return fixed + layer.saved_bytes


def value_load_s(value: Traffic, link: Link) -> float:
    """Return the seconds that a value, with its gradient, adds to the load of each device that it
    leaves or enters.
    """
    messages = 1 + (value.gradient_bytes > 0)
    return (
        value.output_bytes + value.gradient_bytes
    ) / link.bandwidth_bytes_per_s + messages * link.latency_s


def moved_values(layer_costs: LayerCosts, layers: frozenset[int]) -> list[Traffic]:
    """Return the values that enter or leave these layers, each once."""
    leaving = [t for t in layer_costs.traffic if t.producer in layers and set(t.users) - layers]
    return leaving + [
        t for t in layer_costs.traffic if t.producer not in layers and layers.intersection(t.users)
    ]
