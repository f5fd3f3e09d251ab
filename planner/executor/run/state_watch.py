"""Notice when a number of Python that loss() or forward() reads changes: captured layers keep the
one that they had.

on_update() may count epochs, a dataset may anneal, a script may set an attribute of its model. In
one process the next step sees that. Here layers are captured once; and blocks, which run as they
are, are on several workers, one of which alone calls on_update().
"""

from planner.errors import ModelFileError
from planner.executor.run.some_minibatches import SomeMinibatches
from planner.model.python_state import PythonState

_HINT = (
    "let forward() count in a buffer, return it with the output where loss() needs it, and train "
    "with one microbatch: "
    "`microbatches=1`"
)
_BLOCKS_HINT = (
    "let blocks return what later ones need; what on_update() changes needs a plan for one worker"
)


class StateWatch:
    """Looks at the values before some minibatches.

    Args:
        state: as it was when the model was captured.
        last: the number of the run's last minibatch.
        runs_blocks: whether the user's modules run as they are, on several workers.
    """

    def __init__(self, state: PythonState, last: int, *, runs_blocks: bool = False) -> None:
        self._state = state
        self._runs_blocks = runs_blocks
        self._some = SomeMinibatches(last)
        self._newest = -1  # minibatch that was looked at

    def check(self, minibatch: int) -> None:
        """Raise ModelFileError where a value is another one before the forward of a minibatch."""
        if minibatch == self._newest or minibatch not in self._some:
            return
        self._newest = minibatch
        change = self._state.change()
        if change is None:
            return
        what = (
            f"before minibatch {minibatch} {change.words} is another value than when the "
            f"model was captured"
        )
        if self._runs_blocks:
            raise ModelFileError(
                f"{what}, and loss() or a block reads it: those of other workers do not see the "
                f"change",
                hint=_BLOCKS_HINT,
            )

        raise ModelFileError(
            f"{what}, and loss() or forward() reads it: the captured layers keep the value that "
            f"it had",
            hint=_HINT,
        )
