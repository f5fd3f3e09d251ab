"""NewestMuon: orthogonalised updates in which the newest gradient weighs half.

Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest matrix
whose singular values are all 1. Momentum itself is a delay: so the newest gradient weighs half
here, and the average of all the other half.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

# The quintic iteration of Jordan et al.: five steps bring singular values from 0.001 to 1 into
# about 0.7 to 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7

# The root mean square of an orthogonal matrix of r x c is 1/sqrt(max(r, c)). With this factor times
# sqrt(r) an update of a matrix no wider than high is about as large as one of AdamW, so that both
# take one learning rate (Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2, which
# takes 0.2 and the longer side). Wide matrices get less, which was measured to matter most.
_SIZE = 0.4
_FUSED = 3  # queries, keys and values are often one matrix
# elements of matrices that are orthogonalised together: their copies take memory
_MOST_TOGETHER = 2**24
# Rows or columns of these are one token's or one class's: orthogonalising mixes what is rarely seen
# together.
_EMBEDDINGS = {"wte", "wpe", "tokens", "positions", "characters"}
_HEADS = {"head", "heads", "lm_head", "fc", "classifier", "score", "output_projection"}


def is_table(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is an embedding or a head, by its name in the model."""
    return any(part in _EMBEDDINGS | _HEADS or "embed" in part for part in name.split("."))


class NewestMuon(Optimizer):
    """Muon with half the weight on the newest gradient, and AdamW for all that is no matrix inside
    the model.

    Matrices, and kernels of convolutions as matrices of one row per output, are updated by

        w -= lr · (weight_decay · w + 0.4 · sqrt(rows) · NS5(newest · g + (1 − newest) · EMA(g)))

    where NS5 is five steps of Newton and Schulz. A matrix with one side three times the other is
    taken for the weights of queries, keys and values, and its three squares are orthogonalised one
    by one. Kernels are sized by the longer side. Biases, scales of norms, embeddings and heads are
    updated by AdamW. State: one buffer per matrix, two for everything else.

    Args:
        lr: learning rate of matrices, embeddings and heads.
        vectors: learning rate of biases and norms, relative to `lr`; with more, late gradients move
            them too far.
        betas: of AdamW. Without a first moment by default, because momentum adds to the delay of
            late gradients.
        average: how much of the average of gradients stays at each step, from 0 to 1.
        newest: weight of the newest gradient against that average, from 0 to 1. 0.5 is for late
            gradients; 0.05 with an average of 0.95 is the usual Muon with Nesterov's momentum.
        weight_decay: of matrices, per step, times the learning rate. AdamW's parameters do not
            decay.
        to_adamw: says whether AdamW takes a parameter of two or more dimensions, as embeddings and
            heads.

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
                raise ValueError(
                    f"{name} is {value}; it must be "
                    f"{'from 0 to 1' if name in shares else '0 or more'}"
                )
        named = list(named_parameters)
        large = [(name, parameter) for name, parameter in named if parameter.ndim >= 2]
        tables = [parameter for name, parameter in large if to_adamw(name, parameter)]
        matrices = [parameter for name, parameter in large if not to_adamw(name, parameter)]
        flat = [parameter for _, parameter in named if parameter.ndim < 2]
        # All groups exist in every part of a model, so that schedulers and checkpoints find the
        # same three.
        by_adamw = {"orthogonal": False, "betas": betas, "eps": eps, "weight_decay": 0.0}
        to_orthogonalise = {"average": average, "newest": newest, "weight_decay": weight_decay}
        groups = [
            {"params": matrices, "orthogonal": True, **to_orthogonalise},
            {"params": tables, **by_adamw},
            {"params": flat, "lr": lr * vectors, **by_adamw},
        ]
        super().__init__(groups, {"lr": lr})

    def whole_parameters(self) -> list[nn.Parameter]:
        """Return the matrices: replicas that divide the optimizer's state deal them out, and divide
        all others.
        """
        return [
            each for group in self.param_groups if group["orthogonal"] for each in group["params"]
        ]

    @staticmethod
    def updates(mixed: Tensor) -> Tensor:
        """Return the update of mixed gradients and averages (number, rows, columns, ...), but for
        the learning rate.
        """
        flat = mixed.flatten(2)
        rows, columns = flat.shape[1:]
        if mixed.ndim == 3 and columns == _FUSED * rows:
            return NewestMuon.updates(mixed.mT).mT
        each = (
            flat.reshape(-1, columns, columns)
            if mixed.ndim == 3 and rows == _FUSED * columns
            else flat
        )
        size: float = _SIZE * (each.shape[1] if mixed.ndim == 3 else max(each.shape[1:])) ** 0.5
        return (orthogonal(each) * size).reshape(mixed.shape)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the loss of `closure`, which computes
        it anew.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = [
                parameter for parameter in group["params"] if parameter.grad is not None
            ]
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
            gradients = [cast("Tensor", parameter.grad) for parameter in chunk]
            averages = [self.state[parameter]["average"] for parameter in chunk]
            torch._foreach_lerp_(averages, gradients, 1.0 - group["average"])
            mixed = torch._foreach_lerp(averages, gradients, group["newest"])
            updates = self.updates(torch.stack(mixed)).to(mixed[0].dtype)
            if group["weight_decay"]:
                torch._foreach_mul_(chunk, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(chunk, list(updates), alpha=-group["lr"])

    def _step_others(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                # whose value fake tensors know, as estimates of the update need
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = (
                    torch.zeros_like(parameter),
                    torch.zeros_like(parameter),
                )
        adamw(
            parameters,
            [cast("Tensor", parameter.grad) for parameter in parameters],
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
    """Return matrices (number, rows, columns) with the same singular vectors, whose singular values
    are about 1.

    They are bfloat16 on a GPU, whose tensor cores make it fast.
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
        found = torch.baddbmm(
            found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a
        )
    return found if wide else found.mT


def _alike(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    kinds: defaultdict[object, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        kinds[parameter.shape, parameter.dtype, parameter.device].append(parameter)
    for alike in kinds.values():
        most = max(1, _MOST_TOGETHER // max(alike[0].numel(), 1))
        yield from (alike[start : start + most] for start in range(0, len(alike), most))
