"""Read the graphs of Piper (Tarnawski et al., "Piper: Multidimensional Planner for DNN
Parallelization", NeurIPS 2021).

Edges from one node are one value here, which crosses a cut once. Such a profile can be planned
with, not trained with.

    timePerSample                forward and backward; what recomputing adds is taken for the
                                 forward
    memoryUsageA, memoryUsageB   bytes of each microbatch in flight, and those beside them
    parameterSize                bytes that replicas all-reduce; they are part of memoryUsageB
    syncTimeFw, syncTimeBw       left out: bytes that ranks exchange beside an edge's own where a
                                 cut crosses that
"""

import graphlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from planner.errors import ProfileError
from planner.formats.files import first_problem
from planner.formats.profile import DegreeCosts, Device, Edge, Layer, Profile, Provenance, Value
from planner.version import __version__

RECOMPUTING = "activation recomp"
_COLUMNS = DegreeCosts.model_fields.keys() - {
    "degree",
    "source",
    "by_samples",
    "experts",
    "by_tokens",
}
_HINT = "such a file has 'maxDevices', 'nodes' with 'TMPCs', and 'edges'"


_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


# Names as the file spells them.
class _Costs(BaseModel):
    id: str
    timePerSample: _Number  # noqa: N815
    parameterSize: _Number  # noqa: N815
    memoryUsageA: _Number  # noqa: N815
    memoryUsageB: _Number  # noqa: N815


class _Node(BaseModel):
    id: int
    name: str = ""
    TMPCs: dict[int, tuple[_Costs, ...]]


class _Edge(BaseModel):
    sourceId: int  # noqa: N815
    destId: int  # noqa: N815
    communicationCost: _Number  # noqa: N815


class _Graph(BaseModel):
    maxMemoryPerDevice: float = Field(gt=0)  # noqa: N815
    nodes: tuple[_Node, ...] = Field(min_length=1)
    edges: tuple[_Edge, ...]


def _divided(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: tuple(row.get(name, 0) for row in rows) for name in _COLUMNS}  # all-reduces: none


def load_piper(path: Path) -> Profile:
    """Read a graph, with the memory of its devices; raise ProfileError naming the file and what is
    wrong in it.
    """
    try:
        graph = _Graph.model_validate(json.loads(path.read_text(encoding="utf-8")))
        nodes = {node.id: node for node in graph.nodes}
        waits = {
            node.id: [edge.sourceId for edge in graph.edges if edge.destId == node.id]
            for node in graph.nodes
        }
        order = [nodes[number] for number in graphlib.TopologicalSorter(waits).static_order()]
        unknown = {
            number for edge in graph.edges for number in (edge.sourceId, edge.destId)
        } - nodes.keys()
        if unknown:
            raise ValueError(f"an edge names the unknown node {min(unknown)}")
    except ValidationError as cause:
        raise ProfileError(f"'{path}': {first_problem(cause)}", hint=_HINT) from None
    except (OSError, ValueError, KeyError) as cause:  # a cycle is a ValueError, too
        raise ProfileError(f"'{path}' cannot be read: {cause}", hint=_HINT) from None
    degrees = sorted(set.intersection(*(set(node.TMPCs) for node in order)))
    if degrees[:1] != [1]:
        raise ProfileError(f"'{path}': not every node has costs on 1 device", hint=_HINT)
    columns = {degree: [_columns(node.TMPCs[degree]) for node in order] for degree in degrees}
    layers = tuple(
        Layer(name=str(node.id), op=node.name, outputs=_outputs(node, graph.edges), **costs)
        for node, costs in zip(order, columns[1], strict=True)
    )
    return Profile(
        model=path.stem,
        device=Device(kind="unknown", name="unknown", memory_bytes=round(graph.maxMemoryPerDevice)),
        layers=layers,
        edges=tuple(
            Edge(source=str(edge.sourceId), value=str(edge.sourceId), target=str(edge.destId))
            for edge in graph.edges
        ),
        tensor=tuple(
            DegreeCosts(
                degree=degree,
                source="imported",
                **_divided(columns[degree]),
            )
            for degree in degrees[1:]
        )
        or None,
        provenance=Provenance(tool=f"planner {__version__}, from '{path.name}'", source="imported"),
    )


def _columns(ways: Sequence[_Costs]) -> dict[str, Any]:
    plain = min(ways, key=lambda way: way.timePerSample)
    again = next(
        (way.timePerSample for way in ways if way.id == RECOMPUTING), plain.timePerSample * 4 / 3
    )
    forward_s = min(again - plain.timePerSample, plain.timePerSample)
    weight_bytes = round(plain.parameterSize)
    return {
        "forward_s": forward_s,
        "backward_s": plain.timePerSample - forward_s,
        "update_s": 0.0,
        "gradient_bytes": weight_bytes,
        # all versions of the weights among them
        "buffer_bytes": max(0, round(plain.memoryUsageB) - weight_bytes),
        "saved_bytes": round(plain.memoryUsageA),
    }


def _outputs(node: _Node, edges: Sequence[_Edge]) -> tuple[Value, ...]:
    sizes = [round(edge.communicationCost) for edge in edges if edge.sourceId == node.id]
    return (
        (Value(name=str(node.id), output_bytes=max(sizes), gradient_bytes=max(sizes)),)
        if sizes
        else ()
    )
