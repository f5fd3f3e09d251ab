"""Plans to export."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from planner.formats.plan import Plan
from tests.executor.plans import make_plan
from tests.samples import layer, profile


def plan_of(
    stages: Sequence[Sequence[str]],
    replicas: Sequence[int] | None = None,
    schedule: str = "1f1b-flush",
    microbatches: int = 8,
) -> Plan:
    """A plan of a chain of layers with these names, divided like this."""
    names = [name for stage in stages for name in stage]
    model = profile(*(layer(name, 1.0, 2.0, output_bytes=8) for name in names))
    plan = make_plan(model, replicas or [1] * len(stages), schedule, microbatches)
    ends = list(accumulate(map(len, stages)))
    divided = [tuple(names[start:end]) for start, end in pairwise([0, *ends])]
    return plan.model_copy(
        update={
            "stages": tuple(
                s.model_copy(update={"layers": d})
                for s, d in zip(plan.stages, divided, strict=True)
            )
        }
    )
