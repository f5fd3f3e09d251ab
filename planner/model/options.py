"""How a model's modules run, besides what its layers compute: precision, memory layout,
compilation.

Mixed precision is torch.autocast around each stage, because a captured graph does not record it. Or
the weights are in half precision themselves, with masters: copies in float32 that the optimizer
steps, while gradients are summed in float32 (Micikevicius et al., "Mixed Precision Training", ICLR
2018, section 3.1; as in Megatron-LM).
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.errors import InputError
from planner.model.torch_private import tree_map_only
from planner.runtime import known_kinds

if TYPE_CHECKING:
    from planner.formats.plan import Plan
    from planner.formats.profile import Autocast, Profile

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
"""(output, target) -> the mean loss of the batch, a 0-dimensional tensor."""

_NAMES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
# By the number of dimensions: samples, channels, and two or three of space.
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class ModuleOptions:
    """How modules are measured and trained; a profile and its plans carry the same."""

    autocast: torch.dtype | None = None  # that modules run under torch.autocast with
    channels_last: bool = False  # whether weights and images are in channels-last order
    compiled: bool = False  # whether each stage goes through torch.compile
    # kind that modules run on: its rules say which dtypes values have under autocast
    device: str = "cpu"
    # of weights and inputs, where weights have masters; there is no autocast then
    half: torch.dtype | None = None
    # gradients are summed in it, too, and losses computed, as in some programs of others
    sums_in_half: bool = False

    def input(self, tensor: Tensor) -> Tensor:
        """Return an argument of the model as the modules take it."""
        if self.channels_last:
            tensor = channels_last(tensor)
        if self.half is not None and tensor.is_floating_point():
            return tensor.to(self.half)
        return tensor

    def loss(self, loss: LossFunction | None) -> LossFunction | None:
        """Return the model file's loss of outputs in float32: in half precision it would have three
        digits.
        """
        if loss is None or self.half is None or self.sums_in_half:
            return loss

        def upcast(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            return leaf.float()

        return lambda output, target: loss(tree_map_only(Tensor, upcast, output), target)

    def prepare(self, module: nn.Module) -> None:
        """Bring the weights of `module` into the format and the dtype that it runs with, in
        place.
        """
        if self.channels_last:
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.dim() in _FORMATS:
                    tensor.data = channels_last(tensor.data)

        for each in module.modules() if self.half is not None else ():
            # What is no part of a state dict, such as frequencies of rotary embeddings, is computed
            # in float32, and so are the statistics of BatchNorm, which takes inputs in half
            # precision beside them.
            kept = each._non_persistent_buffers_set
            buffers = [tensor for name, tensor in each._buffers.items() if name not in kept]
            for weight in (
                () if isinstance(each, _BatchNorm) else (*each._parameters.values(), *buffers)
            ):
                if weight is None or weight.dtype not in (torch.float32, self.half):
                    continue
                weight.data = weight.data.to(self.half)
                if weight.requires_grad and not self.sums_in_half:
                    if not hasattr(weight, "grad_dtype"):
                        problem = (
                            f"PyTorch {torch.__version__} cannot sum gradients of half "
                            f"precision in float32"
                        )
                        raise InputError(
                            problem,
                            hint="install PyTorch 2.10 or later, or leave out `master_weights`",
                        )
                    weight.grad_dtype = torch.float32


def parameter_like(parameter: Tensor, data: Tensor) -> nn.Parameter:
    """Return a parameter with other `data`, which is trained and whose gradients are summed as
    those of another, with the user's attributes, by which optimizer() may group.
    """
    made = bare_parameter_like(parameter, data)
    vars(made).update(vars(parameter))
    return made


def bare_parameter_like(parameter: Tensor, data: Tensor) -> nn.Parameter:
    """Return the same without attributes, among which fake tensors have those of their mode."""
    made = nn.Parameter(data, parameter.requires_grad)
    if gradient_dtype(parameter) != parameter.dtype:
        made.grad_dtype = gradient_dtype(parameter)
    return made


def gradient_hooks(parameter: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return the user's hooks on the gradient of a parameter."""
    return [*(parameter._backward_hooks or {}).values()]


def copy_hooks(source: Tensor, target: Tensor) -> None:
    """Put the hooks on the gradient of a parameter on another one of its shape, which stands for
    it.
    """
    if source._backward_hooks:
        target._backward_hooks = OrderedDict(source._backward_hooks)


def gradient_bytes(parameter: Tensor) -> int:
    """Return the bytes of a parameter's gradient; 0 where it is not trained."""
    if not parameter.requires_grad:
        return 0
    return parameter.numel() * gradient_dtype(parameter).itemsize


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which the gradients of a parameter are summed."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


PLAIN = ModuleOptions()


def module_options(record: "Profile | Plan") -> ModuleOptions:
    """Return the options that `record` was measured with, or is to be trained with."""
    channels_last = record.memory_format == "channels-last"
    autocast = autocast_dtype(record.autocast)
    half = autocast_dtype(record.master_weights)
    return ModuleOptions(autocast, channels_last, bool(record.compiled), record.device.kind, half)


def autocasting(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context of torch.autocast to `dtype`; one without effect for None."""
    if dtype is None:
        return nullcontext()
    # Devices that compute nothing, such as meta, follow the CPU's rules.
    return torch.autocast(device_type if device_type in known_kinds() else "cpu", dtype)


def autocast_name(dtype: torch.dtype | None) -> "Autocast | None":
    """Return the name that profiles give to an autocast dtype."""
    if dtype is None:
        return None
    if dtype == torch.bfloat16:
        return "bfloat16"
    return "float16"


def autocast_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype called `name`; None for float32, which needs no autocast, and an error for
    others.
    """
    if name in (None, "float32", "fp32"):
        return None
    if name not in _NAMES:
        raise InputError(
            f"training in {name} cannot be measured", hint="give float32, bfloat16 or float16"
        )
    return _NAMES[name]


def channels_last(tensor: Tensor) -> Tensor:
    """Return `tensor` with its channels innermost in memory; itself if they are, or if it has no
    channels.
    """
    memory_format = _FORMATS.get(tensor.dim())
    if memory_format is None:
        return tensor
    return tensor.contiguous(memory_format=memory_format)
