"""BatchNorm that gathers the statistics of microbatches, for running statistics of whole minibatches.

This is the DeferredBatchNorm of torchgpipe (Kim et al. 2020, arXiv 2004.09910, and its documentation), but with an
unbiased running variance, as in PyTorch's BatchNorm. A microbatch is normalised by its own mean and variance.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.model.capture.operations import Names

_BATCH_NORM = torch.ops.aten.batch_norm.default
MEAN, TRAINING, _MOMENTUM, EPS, CUDNN = 3, 5, 6, 7, 8  # its arguments; the variance follows the mean
_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class RunningStatistics:
    """The buffers of a BatchNorm, by their names in the model."""

    mean: str
    var: str
    count: str | None  # of minibatches; None where the model does not count them
    momentum: float | None  # None: the running statistics are means over all minibatches

    @property
    def module(self) -> str:
        """Name, within a stage, of the DeferredNorm that gathers them."""
        return f"_deferred_{self.mean.replace('.', '_')}"


Statistics = tuple[Tensor, Tensor, Tensor]  # count of values; per channel their mean and sum of squared deviations


class DeferredNorm(nn.Module):
    """BatchNorm that accumulates the statistics of microbatches until `restart`, of all its calls in a forward as one.

    It accumulates in buffers, so that a recomputed forward finds them as the first one did; no state dict has them.
    """

    count: Tensor
    mean: Tensor
    deviations: Tensor

    def __init__(self, running: RunningStatistics, like: Tensor) -> None:
        super().__init__()
        self.running = running
        self._dtype = like.dtype
        zeros = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=like.device), persistent=False)
        self.register_buffer("mean", zeros, persistent=False)  # per channel
        self.register_buffer("deviations", zeros.clone(), persistent=False)  # sum of squares, per channel

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, cudnn: bool) -> Tensor:
        """Return `x` (N, C, ...) normalised per channel by its own statistics, then scaled and shifted."""
        values = x.numel() // x.shape[1]
        if values == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        # With momentum 1 the running statistics become the batch's own, the unbiased variance among them.
        mean, var = (torch.zeros_like(self.mean, dtype=self._dtype) for _ in range(2))
        normalised = torch.batch_norm(x, weight, bias, mean, var, True, 1.0, eps, cudnn)
        with torch.no_grad():
            added = combine(self.statistics, (values, mean, var * (values - 1)))
            for buffer, value in zip(self.statistics, added, strict=True):
                buffer.copy_(value)
        return normalised

    @property
    def statistics(self) -> Statistics:
        return self.count, self.mean, self.deviations

    def restart(self) -> None:
        for value in self.statistics:
            value.zero_()


def combine(one: Statistics, other: tuple[Tensor | int, Tensor, Tensor]) -> Statistics:
    """Return the statistics of both sets of values together, without cancellation (Chan, Golub & LeVeque 1983)."""
    (count, mean, deviations), (more, other_mean, other_deviations) = one, other
    total = count + more
    distance, share = other_mean - mean, more / total.clamp(min=1)
    return total, mean + distance * share, deviations + other_deviations + distance.square() * (count * share)


def running_statistics(node: fx.Node, names: Names) -> RunningStatistics | None:
    """Return the buffers that `node` updates, if it is a BatchNorm in training; else None."""
    if node.target is not _BATCH_NORM or not node.args[TRAINING]:
        return None
    mean, var = (names.buffer(source) if isinstance(source, fx.Node) else None for source in node.args[MEAN:TRAINING])
    momentum = node.args[_MOMENTUM]
    if mean is None or var is None or not isinstance(momentum, (int, float)):
        return None
    counter = f"{mean.rpartition('.')[0]}.{_COUNTER}".removeprefix(".")
    counted = any(_counted(other, names) == counter for other in node.graph.nodes)
    return RunningStatistics(mean, var, counter if counted else None, momentum)


def counts_minibatches(node: fx.Node, names: Names, deferred: Iterable[RunningStatistics]) -> bool:
    """Return whether `node` counts the minibatches of one of `deferred`, which are counted elsewhere."""
    return _counted(node, names) in {running.count for running in deferred if running.count is not None}


def _counted(node: fx.Node, names: Names) -> str | None:
    """Return the buffer that `node` adds 1 to, if that is all it does."""
    if node.target is not torch.ops.aten.add_.Tensor or node.args[1:] != (1,) or node.users:
        return None
    source = node.args[0]
    return names.buffer(source) if isinstance(source, fx.Node) else None


def defer_module(path: str, module: nn.Module) -> DeferredNorm | None:
    """Let a BatchNorm of PyTorch's gather its statistics in training, in what is returned; None for others."""
    if not isinstance(module, _BatchNorm) or type(module).forward is not _BatchNorm.forward:
        return None
    if module.running_mean is None or module.running_var is None:
        return None
    prefix = f"{path}." if path else ""
    running = RunningStatistics(f"{prefix}running_mean", f"{prefix}running_var", f"{prefix}{_COUNTER}", module.momentum)
    norm = DeferredNorm(running, module.running_mean)

    def forward(x: Tensor) -> Tensor:
        if not module.training:
            return _BatchNorm.forward(module, x)
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        result: Tensor = norm(x, module.weight, module.bias, module.eps, torch.backends.cudnn.enabled)
        return result

    module.__dict__["forward"] = forward  # of this object alone; it is found before the class's
    return norm
