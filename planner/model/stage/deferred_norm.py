"""BatchNorm that gathers the statistics of a minibatch's parts, for running statistics of whole minibatches.

A microbatch is normalised by its own mean and variance, as always. But the running statistics are updated once per
minibatch, by its own mean and variance, as if the layer had been given the whole of it: torchgpipe's DeferredBatchNorm
(Kim et al. 2020, arXiv 2004.09910, and its documentation). Unlike there, the running variance is the
unbiased one, as PyTorch's BatchNorm has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument
from torch.nn.modules.batchnorm import _BatchNorm

from planner.model.capture.names import Names

_BATCH_NORM = torch.ops.aten.batch_norm.default
_MEAN, _VAR, _TRAINING, _MOMENTUM, _EPS, _CUDNN = 3, 4, 5, 6, 7, 8  # its arguments
_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class RunningStatistics:
    """The buffers of a BatchNorm by their names in the model; without a `momentum` they are means of all minibatches.

    `count` of minibatches: None where the model does not count them.
    """

    mean: str
    var: str
    count: str | None
    momentum: float | None


Statistics = tuple[Tensor, Tensor, Tensor]  # count of values, per channel their mean and squared deviations, summed


class DeferredNorm(nn.Module):
    """Normalises microbatches, and adds up their statistics until somebody takes them.

    What it adds up is in buffers, which a forward that is run a second time finds as the first one did (see
    `planner.executor.run.recompute`), and which no state dict has. Applied several times in a forward, it counts all
    its inputs as one.

    Args:
        running: the buffers that the statistics are for.
        like: one of them.
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
        self.register_buffer("deviations", zeros.clone(), persistent=False)  # squared, from the mean, summed

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, cudnn: bool) -> Tensor:
        """`x` (N, C, ...) normalised per channel by its own statistics, in C·weight + bias.

        Raises:
            ValueError: when there is one value per channel only, as PyTorch's BatchNorm does.
        """
        values = x.numel() // x.shape[1]
        if values == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        # With momentum 1 the operation leaves the batch's own statistics there, the unbiased variance among them.
        mean, var = (torch.zeros_like(self.mean, dtype=self._dtype) for _ in range(2))
        normalised = torch.batch_norm(x, weight, bias, mean, var, True, 1.0, eps, cudnn)
        with torch.no_grad():
            added = combine(self.statistics, (values, mean, var * (values - 1)))
            for buffer, value in zip(self.statistics, added, strict=True):
                buffer.copy_(value)
        return normalised

    @property
    def statistics(self) -> Statistics:
        """What has been added up."""
        return self.count, self.mean, self.deviations

    def restart(self) -> None:
        """Add up from nothing on."""
        for value in self.statistics:
            value.zero_()


def combine(one: Statistics, other: tuple[Tensor | int, Tensor, Tensor]) -> Statistics:
    """Of the values of both, without cancellation (Chan, Golub & LeVeque 1983)."""
    (count, mean, deviations), (more, other_mean, other_deviations) = one, other
    total = count + more
    distance, share = other_mean - mean, more / total.clamp(min=1)
    return total, mean + distance * share, deviations + other_deviations + distance.square() * (count * share)


def running_statistics(node: fx.Node, names: Names) -> RunningStatistics | None:
    """What the operation `node` of a captured graph updates, where it is a BatchNorm in training; else None."""
    if node.target is not _BATCH_NORM or not node.args[_TRAINING]:
        return None
    buffers = [names.buffer(source) if isinstance(source, fx.Node) else None for source in node.args[_MEAN : _VAR + 1]]
    mean, var = buffers
    momentum = node.args[_MOMENTUM]
    if mean is None or var is None or not isinstance(momentum, (int, float)):
        return None
    counter = f"{mean.rpartition('.')[0]}.{_COUNTER}".removeprefix(".")
    counted = any(_counts(other, names) == counter for other in node.graph.nodes)
    return RunningStatistics(mean, var, counter if counted else None, momentum)


def counts_minibatches(node: fx.Node, names: Names, deferred: Collection[RunningStatistics]) -> bool:
    """Whether `node` counts the minibatches of one of `deferred`, which are counted elsewhere."""
    name = _counts(node, names)
    return name is not None and name in {running.count for running in deferred}


def _counts(node: fx.Node, names: Names) -> str | None:
    """The counter that `node` adds 1 to, if that is all it does."""
    if node.target is not torch.ops.aten.add_.Tensor or node.args[1:] != (1,) or node.users:
        return None
    source = node.args[0]
    name = names.buffer(source) if isinstance(source, fx.Node) else None
    return name if name is not None and name.rpartition(".")[2] == _COUNTER else None


def deferred_arguments(node: fx.Node) -> tuple[Argument, ...]:
    """Of a BatchNorm's arguments those of `DeferredNorm.forward`."""
    return (*node.args[:_MEAN], node.args[_EPS], node.args[_CUDNN])


def defer_module(path: str, module: nn.Module) -> DeferredNorm | None:
    """Let a module of the user's, in training, gather its statistics with what is returned.

    Args:
        path: of the module in the model.
        module: any; None is returned for all but PyTorch's own BatchNorms that have running statistics.
    """
    if not isinstance(module, _BatchNorm) or type(module).forward is not _BatchNorm.forward:
        return None
    if module.running_mean is None or module.running_var is None:
        return None
    prefix = f"{path}." if path else ""
    running = RunningStatistics(f"{prefix}running_mean", f"{prefix}running_var", f"{prefix}{_COUNTER}", module.momentum)
    norm = DeferredNorm(running, module.running_mean)
    module.__dict__["forward"] = _forward_of(module, norm)  # of this object alone, before its class's
    return norm


def _forward_of(module: _BatchNorm, norm: DeferredNorm) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if not module.training:
            return _BatchNorm.forward(module, x)
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        result: Tensor = norm(x, module.weight, module.bias, module.eps, torch.backends.cudnn.enabled)
        return result

    return forward
