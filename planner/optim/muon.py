"""NewestMuon: orthogonalised updates in which the newest gradient weighs half.

Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest matrix whose singular values
are all 1. The length of a step then does not depend on how gradients add up over time, which is what delayed gradients
disturb most. Momentum itself is a delay: an average over the last gradients is older than the newest one. So the newest
gradient weighs half here, and the average of all the other half. `benchmarks/convergence` has the measurements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

# The quintic iteration of Jordan et al.: its slope at 0 is as large as possible, and five steps bring singular values
# from 0.001 to 1 into about 0.7 to 1.2. Updates need no more precision than that.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7

# The root mean square of an orthogonal matrix of r x c is 1/sqrt(max(r, c)). With this factor times sqrt(r) an update
# of a matrix no wider than high is about as large as one of AdamW, so that both take one learning rate (Liu et al.,
# "Muon is Scalable for LLM Training", 2025, section 2.2, which takes 0.2 and the longer side). Wide matrices get less,
# which was measured to matter most. A likely reason: they follow activation functions, whose outputs have means far
# from 0, so that they move all samples in one direction, and with late gradients too far.
_SIZE = 0.4

# Queries, keys and values are often one matrix.
_FUSED = 3

# Matrices of equal shape are orthogonalised together, up to so many elements: their copies take memory.
_MOST_TOGETHER = 2**24

# Rows or columns of these are one token's or one class's: orthogonalising mixes what is rarely seen together.
_EMBEDDINGS = {"wte", "wpe", "tokens", "positions", "characters"}
_HEADS = {"head", "heads", "lm_head", "fc", "classifier", "score", "output_projection"}


def is_table(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is an embedding or a head, by its name in the model."""
    return any(part in _EMBEDDINGS | _HEADS or "embed" in part for part in name.split("."))


class NewestMuon(Optimizer):
    """Muon with half the weight on the newest gradient, and AdamW for all that is no matrix inside the model.

    Matrices, and kernels of convolutions as matrices of one row per output, are updated by

        w -= lr · (weight_decay · w + 0.4 · sqrt(rows) · NS5(newest · g + (1 − newest) · EMA(g)))

    where NS5 is five steps of Newton and Schulz. A row makes one output, as in `nn.Linear`. A matrix with
    one side three times the other is taken for the weights of queries, keys and values, and its three squares are
    orthogonalised one by one: together, the values' larger gradients would leave queries and keys little. Kernels are
    sized by the longer side. Biases, scales of norms, embeddings and heads are updated by AdamW.
    State: one buffer per matrix, two for everything else.

    Args:
        named_parameters: of the model, or of a part of it, with their names.
        lr: learning rate of matrices, embeddings and heads.
        vectors: learning rate of biases and norms, relative to `lr`. All positions add to their gradients, so that
            they move in one direction for long, and with late gradients too far.
        betas: of AdamW. Without a first moment by default, because momentum adds to the delay of late gradients.
        average: how much of the average of gradients stays at each step, from 0 to 1.
        newest: weight of the newest gradient against that average, from 0 to 1. 0.5 is for late gradients; 0.05 with
            an average of 0.95 is the usual Muon with Nesterov's momentum.
        weight_decay: of matrices, per step, times the learning rate. AdamW's parameters do not decay.
        eps: of AdamW.
        to_adamw: says by name whether AdamW takes a parameter of two or more dimensions; None for embeddings and
            heads, which are recognised by usual names.

    Raises:
        ValueError: when a number is outside its range.
    """

    # What a row becomes depends on its whole matrix.
    elementwise = False

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float = 2e-3,
        *,
        vectors: float = 0.06,
        betas: tuple[float, float] = (0.0, 0.98),
        average: float = 0.9,
        newest: float = 0.5,
        weight_decay: float = 0.01,
        eps: float = 1e-8,
        to_adamw: Callable[[str, nn.Parameter], bool] = is_table,
    ) -> None:
        shares = {"average": average, "newest": newest, "betas[0]": betas[0], "betas[1]": betas[1]}
        numbers = {"lr": lr, "vectors": vectors, "weight_decay": weight_decay, "eps": eps}
        for name, value in (shares | numbers).items():
            if value < 0.0 or (name in shares and value > 1.0):
                raise ValueError(f"{name} is {value}; it must be {'from 0 to 1' if name in shares else '0 or more'}")
        named = list(named_parameters)
        large = [(name, parameter) for name, parameter in named if parameter.ndim >= 2]
        tables = [parameter for name, parameter in large if to_adamw(name, parameter)]
        matrices = [parameter for name, parameter in large if not to_adamw(name, parameter)]
        flat = [parameter for _, parameter in named if parameter.ndim < 2]
        # All groups exist in every part of a model, so that schedulers and checkpoints find the same three.
        to_orthogonalise = {"average": average, "newest": newest, "weight_decay": weight_decay}
        by_adamw = {"orthogonal": False, "betas": betas, "eps": eps, "weight_decay": 0.0}
        groups = [
            {"params": matrices, "orthogonal": True, **to_orthogonalise},
            {"params": tables, **by_adamw},
            {"params": flat, "lr": lr * vectors, **by_adamw},
        ]
        super().__init__(groups, {"lr": lr})

    def whole_parameters(self) -> list[nn.Parameter]:
        """Return the matrices: replicas that divide the optimizer's state deal them out, and divide all others."""
        return [each for group in self.param_groups if group["orthogonal"] for each in group["params"]]

    @staticmethod
    def updates(mixed: Tensor) -> Tensor:
        """Return what is added to matrices or kernels, times the negative learning rate.

        Args:
            mixed: gradients and their averages, of shape (number, rows, columns, ...).
        """
        flat = mixed.flatten(2)
        rows, columns = flat.shape[1:]
        if mixed.ndim == 3 and columns == _FUSED * rows:
            return NewestMuon.updates(mixed.mT).mT
        each = flat.reshape(-1, columns, columns) if mixed.ndim == 3 and rows == _FUSED * columns else flat
        size: float = _SIZE * (each.shape[1] if mixed.ndim == 3 else max(each.shape[1:])) ** 0.5
        return (orthogonal(each) * size).reshape(mixed.shape)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients again, and returns the loss.

        Returns:
            The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters and group["orthogonal"]:
                self._step_matrices(parameters, group)
            elif parameters:
                self._step_others(parameters, group)
        return loss

    def _step_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["average"] = torch.zeros_like(parameter)
        for chunk in _alike(parameters):
            gradients = [_gradient(parameter) for parameter in chunk]
            averages = [self.state[parameter]["average"] for parameter in chunk]
            torch._foreach_lerp_(averages, gradients, 1.0 - group["average"])
            mixed = torch._foreach_lerp(averages, gradients, group["newest"])
            updates = self.updates(torch.stack(mixed)).to(mixed[0].dtype)
            if group["weight_decay"]:
                torch._foreach_mul_(chunk, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(chunk, list(updates), alpha=-group["lr"])

    def _step_others(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)  # whose value fake tensors know, as estimates of the update need
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [_gradient(parameter) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices with the same singular vectors, whose singular values are about 1.

    Args:
        matrices: of shape (number, rows, columns).

    Returns:
        The same shape; bfloat16 on a GPU, whose tensor cores make it fast; on a CPU, the type of `matrices`.
    """
    # Norms first: in a short type they could overflow.
    found: Tensor = matrices / matrices.flatten(1).norm(dim=1).clamp(min=_LEAST_NORM)[:, None, None]
    if found.device.type != "cpu":
        found = found.bfloat16()
    wide = found.shape[1] <= found.shape[2]
    found = found if wide else found.mT
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found if wide else found.mT


def _alike(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of parameters of one shape, type and device, of up to `_MOST_TOGETHER` elements together."""
    kinds: defaultdict[object, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        kinds[parameter.shape, parameter.dtype, parameter.device].append(parameter)
    for alike in kinds.values():
        most = max(1, _MOST_TOGETHER // max(alike[0].numel(), 1))
        yield from (alike[start : start + most] for start in range(0, len(alike), most))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
