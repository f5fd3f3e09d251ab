"""Random small models for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value


@st.composite
def profiles(
    draw: st.DrawFn, most_layers: int = 5, linear: bool = False, measured: bool = False
) -> Profile:
    """Layers with small round costs and edges forward: a chain with skips, or any DAG unless
    `linear`.

    `measured`: of a model that was captured, and perhaps with workspaces.

    Small integers make ties and zeros common, which is where searches go wrong.
    """
    count = draw(st.integers(1, most_layers))
    small = st.integers(0, 8)
    names = [f"layer{index}" for index in range(count)]
    edges: list[Edge] = []
    for source in range(count):
        for target in range(source + 1, count):
            next_one = target == source + 1
            if (
                (linear and next_one)
                or draw(st.integers(0, 3)) == 0
                or (next_one and draw(st.booleans()))
            ):
                value = f"{names[source]}.{draw(st.integers(0, 1))}"
                edges.append(Edge(source=names[source], value=value, target=names[target]))
    made = {edge.value for edge in edges}
    works = measured and draw(st.booleans())
    adds = draw(st.booleans())  # what adding up gradients takes is known
    layers = []
    for index, name in enumerate(names):
        outputs = tuple(
            Value(name=f"{name}.{number}", output_bytes=draw(small), gradient_bytes=draw(small))
            for number in range(2)
            if f"{name}.{number}" in made
        )
        trainable = draw(small) * draw(st.integers(0, 1))
        layers.append(
            Layer(
                name=name,
                op="op",
                forward_s=draw(st.integers(1, 8)) if index == 0 else draw(small),
                backward_s=draw(small),
                update_s=draw(st.integers(0, 3)),
                accumulate_s=draw(st.integers(0, 3)) if trainable and adds else 0,
                outputs=outputs,
                weight_bytes=trainable + draw(st.integers(0, 2)),
                gradient_bytes=trainable,
                optimizer_bytes=trainable * draw(st.integers(0, 2)),
                buffer_bytes=draw(st.integers(0, 2)),
                saved_bytes=draw(small),
                workspace_bytes=draw(small) if works else 0,
                update_workspace_bytes=draw(small) if works else 0,
            )
        )
    return Profile(
        model="random",
        graph_hash="0123" if measured else None,
        device=Device(kind="cpu", name="imagined"),
        microbatch_size=2,
        layers=tuple(layers),
        edges=tuple(edges),
        no_cut_after=tuple(name for name in names if draw(st.integers(0, 7)) == 0),
        provenance=Provenance(tool="tests", source="estimated"),
    )
