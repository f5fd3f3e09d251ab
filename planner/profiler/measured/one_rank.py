"""Run layers that ranks divide between them in one process: as the first rank of a group that is not there.

The rank computes with its parts of the weights, as in training. Its collectives move nothing, through PyTorch's backend
`fake`: their bytes are counted, because what they take depends on the links of a cluster and not on the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import InputError
from planner.formats.profile import DEGREE_COLUMNS, DegreeCosts, Profile
from planner.profiler.flops import of_dtensors
from planner.profiler.measured.clock import LayerMarks, MarkT

if TYPE_CHECKING:  # importing DTensor takes a second, which only groups are worth
    from planner.model.tensor.group import TensorGroup

COLLECTIVES = "_c10d_functional"  # the namespace of their operations
# A ring sends (t - 1)/t of the bytes for either, and an all-reduce is one after the other.
_SHARES = {"all_reduce": 1.0, "all_gather_into_tensor": 0.5, "reduce_scatter_tensor": 0.5}


@contextmanager
def first_rank(degree: int, device: torch.device) -> Iterator[TensorGroup]:
    """Make a group of which this process is the only rank that is there.

    Raises:
        InputError: if this process has joined others.
    """
    if dist.is_initialized():
        raise InputError(
            "what ranks divide is profiled by one process alone, and this one has joined others",
            hint="start plan profile without torchrun; the times of all-reduces follow from the cluster's links",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from planner.model.tensor.group import TensorGroup

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degree)
    try:
        group = TensorGroup(degree, 0)
        assert dist.group.WORLD is not None
        group.connect(dist.group.WORLD, device)
        yield group
    finally:
        dist.destroy_process_group()


def degree_costs(part: Profile, degree: int, layers: Sequence[Mapping[str, Tensor]], reduced: Reduced) -> DegreeCosts:
    """Return the costs of a rank's layers.

    Args:
        part: the profile of what the rank ran.
        layers: its weights, each in the first layer that uses it.
        reduced: what its collectives had to move.
    """
    columns = {name: tuple(getattr(layer, name) for layer in part.layers) for name in DEGREE_COLUMNS}
    columns["weight_bytes"] = tuple(sum(p.nbytes for p in layer.values()) for layer in layers)
    columns["gradient_bytes"] = tuple(sum(p.nbytes for p in layer.values() if p.requires_grad) for layer in layers)
    return DegreeCosts(degree=degree, source=part.provenance.source, **reduced, **columns)


Reduced = Mapping[str, tuple[int, ...]]  # columns of DegreeCosts


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of a base class without types
    """Counts the collectives that run within its context, as all-reduces."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size_bytes, self.calls = 0.0, 0

    def mark(self) -> tuple[float, int]:
        """Return the bytes and the number so far."""
        return self.size_bytes, self.calls

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if of_dtensors(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::") if hasattr(func, "_schema") else ("", "", "")
        if space.startswith(COLLECTIVES) and name in _SHARES:
            self.size_bytes += _SHARES[name] * max(args[0].nbytes, out.nbytes)
            self.calls += 1
        return out


def reduced(marks: LayerMarks[MarkT], counted: Any) -> Reduced:
    """Return the bytes and the number of each layer's collectives.

    Args:
        counted: returns what `Collectives.mark` returned at a mark.
    """
    found = {}
    for place, name in enumerate(("reduced_bytes", "reduces")):
        sums = marks.sums(lambda start, end, place=place: counted(end)[place] - counted(start)[place])  # type: ignore[misc]
        for way, column in zip(("forward", "backward"), sums, strict=True):
            found[f"{way}_{name}"] = tuple(map(round, column))
    return found
