"""Buffers of a model: which BatchNorm keeps for evaluation, and how all are left as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def statistics_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the statistics of BatchNorm and its kind, which in training nothing
    reads.

    A name alone does not tell: another layer may read its own `running_mean` in training.
    """
    return frozenset(
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _NormBase)
        for name in ("running_mean", "running_var", "num_batches_tracked")
    )


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of `module` afterwards, also those that a forward replaces by other
    tensors.
    """
    before = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for owner, name, buffer, values in before:
            # a forward may have put another tensor in its place, of another shape
            setattr(owner, name, buffer)
            # Through `data`, which autograd does not count as a change: a backward may have saved
            # the buffer.
            buffer.data.copy_(values)
