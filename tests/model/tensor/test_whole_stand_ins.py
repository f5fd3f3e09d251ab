"""optimizer() sees whole weights in place of a rank's parts, which it steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from planner.errors import PlanError
from planner.model.tensor.dimensions import Cut
from planner.model.tensor.division import DividedWeights
from planner.model.tensor.whole_stand_ins import step_parts, with_whole_stand_ins

GROUP = cast("Any", SimpleNamespace(place=1, degree=2))  # the second of two ranks
DIVISION = DividedWeights(GROUP, {"columns": Cut(0), "rows": Cut(1)})


def parts() -> dict[str, nn.Parameter]:
    return {
        "columns": nn.Parameter(torch.ones(3, 8)),
        "rows": nn.Parameter(torch.ones(8, 3)),
        "whole": nn.Parameter(torch.ones(5)),
    }


@pytest.mark.parametrize("device", [None, torch.device("meta")])
def test_stand_ins_have_shapes_and_attributes_of_the_whole(device: torch.device | None) -> None:
    own = parts()
    marked: Any = own["rows"]
    marked._no_weight_decay = True
    given = with_whole_stand_ins(DIVISION, own, device)
    assert given["columns"].shape == (6, 8)
    assert given["rows"].shape == (8, 6)
    assert vars(given["rows"]) == {"_no_weight_decay": True}
    assert given["rows"].untyped_storage().nbytes() == 4
    assert given["whole"] is own["whole"]


def test_state_from_before_the_first_step_is_divided() -> None:
    own = parts()
    given = with_whole_stand_ins(DIVISION, own)
    optimizer = torch.optim.Adagrad(given.values(), lr=0.1, initial_accumulator_value=0.5)
    optimizer.state[given["columns"]]["sum"] = torch.arange(48.0).view(6, 8)
    step_parts(optimizer, DIVISION, own, given)

    assert optimizer.param_groups[0]["params"] == list(own.values())
    assert optimizer.state.keys() == set(own.values())
    kept = optimizer.state[own["columns"]]["sum"]
    assert torch.equal(kept, torch.arange(24.0, 48.0).view(3, 8))
    assert torch.equal(optimizer.state[own["rows"]]["sum"], torch.full((8, 3), 0.5))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_stand_ins_are_refused(kind: str) -> None:
    own = parts()
    given = with_whole_stand_ins(DIVISION, own)
    getattr(given["columns"], kind)(lambda gradient: None)
    optimizer = torch.optim.SGD(given.values(), lr=0.1)
    with pytest.raises(PlanError, match="parameter 'columns'"):
        step_parts(optimizer, DIVISION, own, given)
