"""Workloads of "Efficient Algorithms for Device Placement of DNN Graph Operators" (Tarnawski et
al., NeurIPS 2020).

A JSON file with `nodes`, each a forward or a backward operation with its latency, and `edges`, each
with the cost of moving the value of its source between devices; times are in milliseconds. A
forward and a backward node of one `colorClass` must share a device: a class becomes one layer here,
with the forward node's value and the backward node's as its gradient. The file knows costs, not
bytes, so bytes are counted at `BYTES_PER_S`: with a link of that bandwidth and the max-load
objective, transfers cost what the file says. Such a profile can be planned with, not trained with.
"""

from __future__ import annotations

import graphlib
import json
from collections import defaultdict
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from planner.errors import ProfileError
from planner.formats.files import first_problem
from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value
from planner.version import __version__

# 2^31 per millisecond, in which the published costs are whole numbers of bytes
BYTES_PER_S = 2000 * 2**30
_HINT = "such a file has 'maxFPGAs', 'nodes' and 'edges'; see the workloads of the paper's authors"


class _Node(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    id: int
    name: str
    fpgaLatency: float  # noqa: N815 - the file's spelling
    supportedOnFpga: bool  # noqa: N815
    isBackwardNode: bool  # noqa: N815
    colorClass: int | None = None  # noqa: N815
    size: float = 0.0


class _Edge(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    sourceId: int  # noqa: N815
    destId: int  # noqa: N815
    cost: float


class _Workload(BaseModel):
    model_config = ConfigDict(extra="ignore")
    maxSizePerFPGA: float  # noqa: N815
    maxFPGAs: int  # noqa: N815
    nodes: tuple[_Node, ...]
    edges: tuple[_Edge, ...]


def is_workload(content: object) -> bool:
    """Whether parsed JSON looks like such a file."""
    return isinstance(content, dict) and {"maxFPGAs", "nodes", "edges"} <= content.keys()


def load_workload(path: Path) -> Profile:
    """Read a workload; its device's memory is the file's.

    Raises:
        ProfileError: naming the file and what is wrong in it, or what a plan here cannot express.
    """
    try:
        workload = _Workload.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as cause:
        raise ProfileError(f"'{path}': {first_problem(cause)}", hint=_HINT) from None
    except (OSError, ValueError) as cause:
        raise ProfileError(f"'{path}' cannot be read: {cause}", hint=_HINT) from None
    for node in workload.nodes:
        if not node.supportedOnFpga:
            raise ProfileError(
                f"'{path}': {node.name} runs on a CPU only, and plans have none", hint=_HINT
            )
    classes = _classes(path, workload)
    forward, backward = (_edges(path, workload, classes, backward=side) for side in (False, True))
    if not backward.keys() <= forward.keys():
        source, target = next(iter(backward.keys() - forward.keys()))
        raise ProfileError(
            f"'{path}': a gradient goes from {source} to {target}, where no activation does",
            hint=_HINT,
        )
    outputs, gradients = (_bytes_of_producers(edges) for edges in (forward, backward))
    names = _topological(path, list(dict.fromkeys(classes.values())), forward)
    nodes = defaultdict(list)
    for node in workload.nodes:
        nodes[classes[node.id]].append(node)
    used = {source for source, _ in forward}
    layers = tuple(
        Layer(
            name=name,
            op="",
            forward_s=sum(node.fpgaLatency for node in nodes[name] if not node.isBackwardNode)
            / 1e3,
            backward_s=sum(node.fpgaLatency for node in nodes[name] if node.isBackwardNode) / 1e3,
            update_s=0.0,
            outputs=(
                Value(name=name, output_bytes=outputs[name], gradient_bytes=gradients.get(name, 0)),
            )
            if name in used
            else (),
            buffer_bytes=round(sum(node.size for node in nodes[name])),
        )
        for name in names
    )
    position = {name: index for index, name in enumerate(names)}
    ordered = sorted(forward, key=lambda edge: (position[edge[0]], position[edge[1]]))
    return Profile(
        model=path.stem,
        device=Device(kind="unknown", name="unknown", memory_bytes=round(workload.maxSizePerFPGA)),
        layers=layers,
        edges=tuple(Edge(source=source, value=source, target=target) for source, target in ordered),
        provenance=Provenance(tool=f"planner {__version__}, from '{path.name}'", source="imported"),
    )


def _classes(path: Path, workload: _Workload) -> dict[int, str]:
    """The layer of each node: its colour class, named by the class's first forward node."""
    members: dict[object, list[_Node]] = defaultdict(list)
    for node in workload.nodes:
        members[node.id if node.colorClass is None else ("class", node.colorClass)].append(node)
    named = {}
    for nodes in members.values():
        ahead = [node for node in nodes if not node.isBackwardNode]
        for node in nodes:
            named[node.id] = (ahead or nodes)[0].name
    if len(set(named.values())) < len(members):
        raise ProfileError(f"'{path}': two colour classes begin with nodes of one name", hint=_HINT)
    return named


def _edges(
    path: Path, workload: _Workload, classes: dict[int, str], *, backward: bool
) -> dict[tuple[str, str], float]:
    """Costs in milliseconds of the edges between layers on one side."""
    side = {node.id: node.isBackwardNode for node in workload.nodes}
    found: dict[tuple[str, str], float] = {}
    for edge in workload.edges:
        for end in (edge.sourceId, edge.destId):
            if end not in classes:
                raise ProfileError(f"'{path}': an edge names the unknown node {end}", hint=_HINT)
        source, target = classes[edge.sourceId], classes[edge.destId]
        if source == target:
            continue
        if side[edge.sourceId] != side[edge.destId]:
            raise ProfileError(
                f"'{path}': the edge from {source} to {target} joins a forward and a backward node",
                hint=_HINT,
            )
        if side[edge.sourceId] == backward:
            found[source, target] = edge.cost
    return found


def _bytes_of_producers(edges: dict[tuple[str, str], float]) -> dict[str, int]:
    """Bytes at `BYTES_PER_S` of each layer's value; the costs of its edges are those of one and the
    same value.
    """
    return {source: round(cost * BYTES_PER_S / 1e3) for (source, _), cost in edges.items()}


def _topological(path: Path, names: list[str], edges: dict[tuple[str, str], float]) -> list[str]:
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter(
        {name: set() for name in names}
    )
    for source, target in edges:
        sorter.add(target, source)
    try:
        return list(sorter.static_order())
    except graphlib.CycleError as cause:
        raise ProfileError(
            f"'{path}': the edges form a cycle, {' -> '.join(cause.args[1])}", hint=_HINT
        ) from None
