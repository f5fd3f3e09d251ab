"""The choices of layers that recompute, of the stages of a space."""

from collections.abc import Iterable, Sequence

import numpy as np

from planner.cost.recomputation import Choices, Recomputation
from planner.cost.work import Floats
from planner.options.solving import RecomputeRule
from planner.solver.problem.states import CutSpace

# of a footprint, which choices decide
KEPT = ("saved_bytes", "working_bytes", "accumulating_bytes")


class StageChoices:
    """The choices under one rule. Many searches ask for them, so the layers' costs remember
    them.
    """

    def __init__(self, space: CutSpace, rule: RecomputeRule) -> None:
        self._space = space
        self._known = space.layer_costs.memo.table(
            (StageChoices, rule), lambda: _Known(Recomputation(space.layer_costs, rule))
        )

    def of(self, state: int, ends: Iterable[int]) -> list[Choices]:
        """Return the choices of the stages from the state to each end; a stage's first
        recomputes least.
        """
        spans = [self._space.span(state, end) for end in ends]
        return self._known.of(spans)


class _Known:
    """The choices of what recomputes, by the layers of a stage."""

    def __init__(self, recomputation: Recomputation) -> None:
        self._recomputation = recomputation
        self._choices: dict[Sequence[int], Choices] = {}

    def of(self, spans: Sequence[Sequence[int]]) -> list[Choices]:
        new = [*dict.fromkeys(span for span in spans if span not in self._choices)]
        if new:
            found = self._recomputation.several([tuple(span) for span in new])
            self._choices.update(zip(new, found, strict=True))
        return [self._choices[span] for span in spans]


def columns_of(choices: list[Choices], names: Iterable[str], first: int = 0) -> dict[str, Floats]:
    """Return columns of all choices of stages one after the other, from the `first` of each stage
    on.
    """
    return {
        name: np.concatenate([getattr(each, name)[first:] for each in choices]) for name in names
    }
