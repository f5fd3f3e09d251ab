"""In which order gradients add up, which stages must keep: a + b + c is rounded otherwise than c +
a + b.

One process adds the gradients of a value, or of a weight, from its last user to its first. Stages
do so, too: the last stage first, and within a stage the last layer first. So the layers that use a
value, or a weight, must be in stages in their order. Two layers could not change places either: one
that uses a value twice, as x * sigmoid(x) does, adds two gradients.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.errors import PlanError
from planner.formats.plan import REMEDY, Plan


@dataclass(frozen=True)
class Sum:
    """A gradient that is the sum of those of several layers.

    Attributes:
        of: the value or the weight.
        users: the layers that use it, in the model's order.
    """

    of: str
    users: Sequence[str]


def check_sums(plan: Plan, sums: Iterable[Sum]) -> None:
    """Raise PlanError, naming the first, if stages add up a gradient in another order than one
    process does.
    """
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    for each in sums:
        stages = [stage_of[user] for user in each.users]
        for place in range(len(stages) - 1):
            later = stages[place + 1 :]
            if min(later) < stages[place]:
                user = each.users[place + 1 + later.index(min(later))]
                raise PlanError(
                    f"layer '{user}' is in an earlier stage than '{each.users[place]}', which "
                    f"stands before it, and "
                    f"both use '{each.of}': its gradients would add up in another order than in "
                    f"one process",
                    hint=REMEDY,
                )
