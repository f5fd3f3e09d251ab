"""Find optimizers that communicate, before they do it among workers that wait for something else.

All collectives of torch.distributed go through PyTorch's dispatcher, as operations of the
namespaces below, which are not public. Written for PyTorch 2.13; an operation that is renamed is
not noticed here, and fails in the first update.
"""

from typing import Any

from planner.errors import ModelFileError
from planner.model.torch_private import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")


class NoCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which a collective raises a ModelFileError instead of running.

    Args:
        who: the optimizer, for the message.

    Attributes:
        operation: the collective that was called.
    """

    def __init__(self, who: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._who = who
        self.operation: str | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in _NAMESPACES:
            self.operation = func.overloadpacket.__name__.strip("_")
            raise ModelFileError(
                f"{self._who} communicates with other processes ({self.operation}), and a stage's "
                f"optimizer is alone: "
                "workers of other stages have other parameters, and would not answer",
                hint="take its variant for one process, such as torch.optim.Muon; planner "
                "averages gradients over "
                "replicas, and shards the optimizer's state with `shard_optimizer`",
            )

        return func(*args, **(kwargs or {}))
