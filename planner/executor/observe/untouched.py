"""Notice when the user's on_update() changes what is trained: one worker alone calls it.

A callback of early days halves the learning rate, or clamps weights, through the optimizer that
optimizer() has returned. In a process of its own that changes the whole model. Here each stage has
an optimizer, and each replica, so only those of the worker that calls on_update() would change.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from planner.errors import ModelFileError

_HINT = (
    "let scheduler() change the learning rate, and a hook of the optimizer change weights: "
    "optimizer() may call "
    "register_step_post_hook() on what it returns, and every stage has its own"
)
_PLAIN = (Tensor, nn.Parameter)

State = dict[str, object]  # of what may not change, by a name for messages


class TrainedState:
    """Weights and hyperparameters of a worker's stages, as far as the host knows of changes without
    a look at values.

    Not noticed is a change of a weight through `.data` in place, of which PyTorch keeps no count.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for module in modules:
            self._tensors.update(module.named_parameters())
            self._tensors.update(module.named_buffers())
        self._optimizers = optimizers

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Let on_update() change nothing within.

        Raises:
            ModelFileError: when it has.
        """
        before = self._now()
        yield
        after = self._now()

        for name in before | after:
            if before.get(name) != after.get(name):
                raise ModelFileError(
                    f"on_update() changes {name}, but one worker alone calls it, and those of "
                    f"other workers would "
                    "stay as they are: that is another training",
                    hint=_HINT,
                )

    def _now(self) -> State:
        state: State = {f"'{name}'": _counted(tensor) for name, tensor in self._tensors.items()}
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                place = f"of the optimizer's group {number}"
                for name, value in group.items():
                    # Each worker has an optimizer of several, if it has several stages.
                    key = f"`{name}` {place}"
                    state[key] = (state.get(key), _hyperparameter(name, value))

        return state


def _counted(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells a change of a tensor: the number of its changes, its memory, and whether it
    is trained.
    """
    version = None if tensor.is_inference() else tensor._version
    memory = tensor.data_ptr() if type(tensor) in _PLAIN else None
    return version, memory, tensor.requires_grad


def _hyperparameter(name: str, value: object) -> object:
    """Return what tells a change of a hyperparameter; of `params`, a change of which they are and
    of their values.
    """
    leaves = tree_leaves(value)
    if name == "params":
        return [(id(leaf), _counted(leaf)) for leaf in leaves]
    return [
        (id(leaf), _counted(leaf)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    ]
