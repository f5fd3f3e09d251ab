"""Find the operations of a backward that compute nothing but gradients of weights.

A schedule that splits the backward may run them later than the others, which earlier stages wait
for (Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 2):

    gradient of the output ----> product with the weight -----> gradient of the input
                           \\
                            `--> product with the input ------> gradient of the weight

Of a linear layer's two products one is of this kind, of attention nothing is. An operation that
computes both, as the backward of a norm does, is not.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.profiler.estimated.execution import Flow
from planner.profiler.estimated.operations import Operation


def of_weights_alone(
    operations: Sequence[Operation], backward: int, layer_of: Sequence[int]
) -> NDArray[np.bool_]:
    """Return of each operation whether all that it leads to are gradients of its layer's weights.

    Args:
        operations: of a step, in the order in which they run.
        backward: number of the first operation of the backward.
        layer_of: the layer of each operation.
    """
    flow = Flow(operations, backward)
    alone = np.zeros(len(operations), dtype=np.bool_)
    for number in range(len(operations) - 1, backward - 1, -1):
        # Nothing reads a gradient of a weight, and the input's is read in the layer before.
        alone[number] = bool(operations[number].writes) and all(
            user > number and alone[user] and layer_of[user] == layer_of[number]
            for user in flow.users(number)
        )

    return alone
