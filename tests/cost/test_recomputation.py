"""Which layers recompute: what that keeps, against small cases by hand and every subset of units
one by one.
"""

from __future__ import annotations

from itertools import compress, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import recomputation
from planner.cost.candidate import Candidate, Groups, StageOptions, whole_stage
from planner.cost.layer_costs import LayerCosts
from planner.cost.recomputation import Choices, Recomputation, units_of
from planner.cost.work import Footprint
from planner.formats.profile import Layer, Profile
from tests.examples import examples
from tests.samples import layer, profile
from tests.solver.strategies import profiles

# Blocks: e and h.0.a, h.0.b; h.1.a, h.1.b; h.2.a and the head.
NAMES = ("e", "h.0.a", "h.0.b", "h.1.a", "h.1.b", "h.2.a", "head")


def named(model: Profile, block_of: list[int]) -> Profile:
    """Name the layers of a profile as parts of blocks."""
    names = {
        layer.name: f"h.{block_of[index]}.{layer.name}" for index, layer in enumerate(model.layers)
    }
    layers = [layer.model_copy(update={"name": names[layer.name]}) for layer in model.layers]
    edges = [
        edge.model_copy(update={"source": names[edge.source], "target": names[edge.target]})
        for edge in model.edges
    ]
    return model.model_copy(
        update={"layers": tuple(layers), "edges": tuple(edges), "no_cut_after": ()}
    )


@st.composite
def models(draw: st.DrawFn, most_layers: int = 6) -> Profile:
    """Small graphs of a few blocks."""
    model = draw(profiles(most_layers=most_layers, measured=True))
    steps = [draw(st.integers(0, 1)) for _ in model.layers]
    return named(model, np.cumsum(steps).tolist())


def footprint(layer_costs: LayerCosts, layers: range, groups: Groups) -> Footprint:
    before = frozenset(range(layers.start))
    return layer_costs.footprint(
        Candidate(before, frozenset(layers), StageOptions(recompute=groups))
    )


def extra_s(layer_costs: LayerCosts, layers: range, groups: Groups) -> float:
    stage = Candidate(
        frozenset(range(layers.start)), frozenset(layers), StageOptions(recompute=groups)
    )
    return float(layer_costs.work(stage).recompute_s)


def every(layer_costs: LayerCosts, layers: range) -> list[Groups]:
    """Every subset of units, and the whole stage."""
    units = [frozenset(unit) for unit in units_of(layer_costs, layers)]
    subsets = (tuple(compress(units, flags)) for flags in product((False, True), repeat=len(units)))
    return [*subsets, whole_stage(layers)]


def block_layers(size: int = 8) -> list[Layer]:
    """Layers with a workspace, whose gradients are as large as their weights."""
    return [
        layer(name, 1, 2, output_bytes=size, weight_bytes=10, saved_bytes=30).model_copy(
            update={"workspace_bytes": 5}
        )
        for name in NAMES
    ]


def test_units_are_the_parts_of_blocks_in_the_stage() -> None:
    layer_costs = LayerCosts(profile(*block_layers()))
    assert units_of(layer_costs, range(7)) == ((0, 1, 2), (3, 4), (5, 6))
    assert units_of(layer_costs, range(2, 4)) == ((2,), (3,))


def test_a_group_keeps_what_enters_it_and_saves_its_layers_once() -> None:
    layer_costs = LayerCosts(profile(*block_layers()))
    none, second = (), (frozenset({3, 4}),)
    plain, again = footprint(layer_costs, range(7), none), footprint(layer_costs, range(7), second)
    # All seven save 30; the block of two keeps the 8 bytes that enter it.
    assert (float(plain.saved_bytes), float(again.saved_bytes)) == (210, 150 + 8)
    # Without accumulation all saved, a workspace and the last gradient; with the group at work: 90
    # + 8 + 60 is less.
    assert plain.total_bytes(1, 1) == 70 + max(n * 30 + 5 + (8 - n) * 10 for n in range(1, 8))
    peaks = [
        30 + 5 + 70,
        60 + 5 + 60,
        90 + 5 + 50,
        98 + 30 + 5 + 40,
        98 + 60 + 5 + 30,
        128 + 5 + 20,
        158 + 5 + 10,
    ]
    assert (
        again.total_bytes(1, 1)
        == 70 + max(peaks) + layer_costs.footprint(layer_costs.single_stage).message_bytes
    )
    assert again.total_bytes(3, 1) == again.total_bytes(1, 1) + 2 * 158
    # Where gradients accumulate, all exist, and the layer at work has its own twice.
    peaks = [n + 70 + 10 for n in (35, 65, 95, 98 + 35, 98 + 65, 128 + 5, 158 + 5)]
    assert again.divided(2).total_bytes(1, 1) == 70 + max(peaks)
    assert extra_s(layer_costs, range(7), second) == 2.0


def test_a_value_that_enters_two_groups_is_kept_once() -> None:
    """As a mask or the encoder's output enters every block."""
    layers = [
        layer("mask", output_bytes=50),
        *(layer(f"h.{n}", output_bytes=8, saved_bytes=30) for n in range(3)),
    ]
    edges = [("mask", f"h.{n}") for n in range(3)] + [("h.0", "h.1"), ("h.1", "h.2")]
    layer_costs = LayerCosts(profile(*layers, edges=edges))
    units = [frozenset(unit) for unit in units_of(layer_costs, range(1, 4))]
    kept = footprint(layer_costs, range(1, 4), tuple(units)).saved_bytes
    assert kept == 50 + 8 + 8
    assert footprint(layer_costs, range(1, 4), (units[1],)).saved_bytes == 30 + 50 + 8 + 30


@settings(max_examples=examples(150), deadline=None)
@given(model=models(), data=st.data())
def test_choices_cost_what_stages_cost_and_none_is_better(
    model: Profile, data: st.DataObject
) -> None:
    layer_costs = LayerCosts(model)
    first = data.draw(st.integers(0, len(model.layers) - 1))
    layers = range(first, data.draw(st.integers(first + 1, len(model.layers))))
    choices = Recomputation(layer_costs).choices(layers)
    assert choices.groups(0) == ()
    rows = [(float(choices.recompute_s[row]), _held(choices, row)) for row in range(len(choices))]
    for row, (seconds, held) in enumerate(rows):
        groups = choices.groups(row)
        assert seconds == pytest.approx(extra_s(layer_costs, layers, groups))
        assert held == pytest.approx(_held_by(footprint(layer_costs, layers, groups)))
    for groups in every(layer_costs, layers):
        seconds, wanted = (
            extra_s(layer_costs, layers, groups),
            _held_by(footprint(layer_costs, layers, groups)),
        )
        for flying, work in product((1, 2, 3, 5, 64), (1, 2)):
            total = (flying - 1) * wanted[0] + wanted[work]
            assert any(
                seconds >= s - 1e-9 and total >= (flying - 1) * held[0] + held[work] - 1e-9
                for s, held in rows
            )


@pytest.mark.parametrize("saved", [30, 4])
def test_equal_units_are_exchanged(saved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six equal blocks: as good as trying all subsets, where activations or gradients are
    larger.
    """
    layers = [
        layer(f"h.{n}", output_bytes=3, weight_bytes=10, saved_bytes=saved).model_copy(
            update={"workspace_bytes": 5}
        )
        for n in range(6)
    ]
    layer_costs = LayerCosts(profile(*layers))
    exact = Recomputation(layer_costs).choices(range(6))
    monkeypatch.setattr(recomputation, "MOST_SUBSETS", 0)
    by_kinds = Recomputation(layer_costs).choices(range(6))
    for each in exact, by_kinds:
        assert each.groups(0) == ()
    for limit in range(60, 400):
        for flying in (1, 3):
            assert least_s(by_kinds, flying, limit) == least_s(exact, flying, limit)


@settings(max_examples=examples(100), deadline=None)
@given(model=models(most_layers=7), flying=st.integers(1, 4), accumulates=st.booleans())
def test_in_order_of_seconds_per_byte_the_time_is_near_the_least(
    model: Profile, flying: int, accumulates: bool
) -> None:
    """Above the least for the bytes that are kept by less than a unit's forward."""
    layer_costs = LayerCosts(model)
    layers = range(len(model.layers))
    exact = Recomputation(layer_costs).choices(layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputation, "MOST_SUBSETS", 0)
        patch.setattr(recomputation, "MOST_CHOICES", 0)
        greedy = Recomputation(layer_costs).choices(layers)
    units = units_of(layer_costs, layers)
    longest_s = max(sum(model.layers[index].forward_s for index in unit) for unit in units)
    lone = len({value for unit in units for value in layer_costs.entering(unit)}) == sum(
        len(layer_costs.entering(unit)) for unit in units
    )
    if not lone:
        return  # what one unit saves depends on the others
    for row in range(len(exact)):
        if not exact.whole[row]:
            enough = greedy.saved_bytes <= exact.saved_bytes[row]
            if enough.any():
                assert greedy.recompute_s[enough].min() <= exact.recompute_s[row] + longest_s + 1e-9


def test_other_rules_leave_one_choice() -> None:
    layer_costs = LayerCosts(profile(*block_layers()))
    units = tuple(frozenset(unit) for unit in units_of(layer_costs, range(7)))
    for rule, groups in (("never", ()), ("always", whole_stage(range(7))), ("blocks", units)):
        choices = Recomputation(layer_costs, rule).choices(range(7))  # type: ignore[arg-type]
        assert (len(choices), choices.groups(0)) == (1, groups)


def test_many_equal_blocks_have_as_many_choices() -> None:
    layers = [layer(f"h.{n}", output_bytes=3, weight_bytes=10, saved_bytes=30) for n in range(80)]
    recomputing = Recomputation(LayerCosts(profile(*layers)))
    choices = recomputing.choices(range(80))
    assert len(choices) == 82  # 0 to 80 of them, and all as one group
    assert choices.groups(3) == tuple(frozenset({n}) for n in range(3))
    assert recomputing.choices(range(10, 20)).groups(1) == (frozenset({10}),)
    assert len(recomputing.choices(range(20, 30))) == 12


def least_s(choices: Choices, flying: int, limit: int) -> float:
    """The least extra time that fits."""
    fits = choices.saved_bytes * flying + choices.working_bytes <= limit
    return float(np.min(choices.recompute_s[fits], initial=np.inf))


def _held(choices: Choices, row: int) -> list[float]:
    saved, working = choices.saved_bytes[row], choices.working_bytes[row]
    return [float(saved), float(saved + working), float(saved + choices.accumulating_bytes[row])]


def _held_by(held: Footprint) -> list[float]:
    saved = float(held.saved_bytes)
    return [saved, saved + float(held.working_bytes), saved + float(held.accumulating_bytes)]
