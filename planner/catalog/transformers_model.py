"""A model of Hugging Face's transformers with random weights, as config.json beside this file
describes it.

Needs `transformers` (pip install 'transformers>=4.50'), and `peft` for adapters. Nothing is
downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 2048  # tokens of a sample, where the model reads tokens
STATES = "float32"  # of AdamW's moments; "bfloat16" takes half the memory, "int8" a quarter
LORA_RANK = 0  # of adapters on all linear layers but the head; 0: the whole model is trained
# a label for each token
TOKEN_LABELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
SAMPLE_LABELS = ("ForSequenceClassification", "ForImageClassification")  # one for each sample


def build_model() -> nn.Module:
    """Return the model with random weights, or a frozen one with LoRA adapters."""
    if not LORA_RANK:
        return build_base()
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear")
    adapted: nn.Module = get_peft_model(build_base(), adapters)
    return adapted


def build_base() -> nn.Module:
    """Return the model without adapters."""
    config = _config()
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model: nn.Module = _class(config)(config)
    for module in [each for each in model.modules() if hasattr(each, "gelu_impl")]:
        # BLOOM writes this function as an autograd function of its own, which cannot be captured.
        module.gelu_impl = nn.GELU(approximate="tanh")
    return model


def example_batch(batch_size: int) -> tuple[tuple[()], dict[str, Tensor], None]:
    """Return random tokens or images, and labels; the model computes its loss itself."""
    config = _config()
    name = config.architectures[0]
    read = _class(config).main_input_name
    if read == "input_ids":
        inputs = torch.randint(0, config.vocab_size, (batch_size, LENGTH))
    elif read == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        inputs = torch.randn(batch_size, config.num_channels, height, width)
    else:
        raise ValueError(f"no data is known for '{read}': write it into example_batch")

    if name.endswith(TOKEN_LABELS) and read == "input_ids":
        labels = inputs
    elif name.endswith(SAMPLE_LABELS):
        labels = torch.randint(0, config.num_labels, (batch_size,))
    else:
        raise ValueError(f"no labels are known for {name}: write them into example_batch")

    return (), {read: inputs, "labels": labels}, None


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW."""
    if STATES == "bfloat16":
        return Bfloat16AdamW(parameters, lr=1e-4)
    if STATES == "int8":
        return Int8AdamW(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4)


class Bfloat16AdamW(torch.optim.Optimizer):
    """AdamW that keeps its moments in bfloat16, and computes in the type of the weights.

    DeepSeek-V3 (2024, section 3.3.3) trains so, with a second beta of 0.95. With 0.999 a second
    moment would move by less than bfloat16's last digit, and stay where it is.
    """

    elementwise = True  # replicas may divide its state

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)

        first, second = group["betas"]
        state["step"] += 1
        parameter.mul_(1 - group["lr"] * group["weight_decay"])

        mean = state["exp_avg"].to(parameter.dtype).lerp_(gradient, 1 - first)
        state["exp_avg"].copy_(mean)
        square = state["exp_avg_sq"].to(parameter.dtype).mul_(second)
        square.addcmul_(gradient, gradient, value=1 - second)
        state["exp_avg_sq"].copy_(square)

        mean.mul_(group["lr"] / (1 - first ** state["step"]))
        root = square.div_(1 - second ** state["step"]).sqrt_().add_(group["eps"])
        parameter.addcdiv_(mean, root, value=-1)


class Int8AdamW(torch.optim.Optimizer):
    """AdamW that keeps a byte of each moment of an element, with a scale for each block of them.

    Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2: elements are
    divided by the largest of their block, and the nearest of 256 numbers is kept. Blocks have 256
    elements, and tensors of fewer than 4,096 keep float32, as in AdamW8bit of bitsandbytes 0.50 and
    of torchao 0.18; as in torchao, so do those that are no whole number of blocks. Updates are
    computed in float32.
    """

    BLOCK = 256
    LEAST = 4096  # elements of a parameter whose moments have 8 bits
    PART = 2**24  # elements that are updated at once, so that little memory is needed beside them

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, settings)

    def whole_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that replicas may not cut, because that would cut their blocks."""
        every = (each for group in self.param_groups for each in group["params"])
        return [parameter for parameter in every if parameter.numel() >= self.LEAST]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        numbers: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                device = parameter.device
                if device not in numbers:
                    signed = torch.tensor(numbers_of_8_bits(signed=True), device=device)
                    unsigned = torch.tensor(numbers_of_8_bits(signed=False), device=device)
                    numbers[device] = signed, unsigned
                self._update(parameter, parameter.grad, group, *numbers[device])

    def _update(
        self,
        parameter: nn.Parameter,
        gradient: Tensor,
        group: dict[str, Any],
        signed: Tensor,
        unsigned: Tensor,
    ) -> None:
        state = self.state[parameter]
        if not state:
            self._begin(state, parameter)
        state["step"] += 1
        if "exp_avg_scale" not in state:
            self._step(
                parameter, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"], group
            )
            return

        weights = parameter.view(-1)
        gradients = gradient.reshape(-1)
        for start in range(0, parameter.numel(), self.PART):
            part = slice(start, start + self.PART)
            blocks = slice(start // self.BLOCK, (start + self.PART) // self.BLOCK)
            means = state["exp_avg"].view(-1)[part], state["exp_avg_scale"][blocks]
            squares = state["exp_avg_sq"].view(-1)[part], state["exp_avg_sq_scale"][blocks]

            mean = self._decoded(*means, signed)
            square = self._decoded(*squares, unsigned)
            self._step(weights[part], gradients[part], mean, square, state["step"], group)
            self._encode(mean, *means, signed)
            self._encode(square, *squares, unsigned)

    def _begin(self, state: dict[str, Tensor], parameter: nn.Parameter) -> None:
        """Make the moments of a parameter, which are 0."""
        count = parameter.numel()
        state["step"] = torch.zeros((), device=parameter.device)
        in_blocks = count % self.BLOCK == 0 and parameter.is_contiguous()
        has_8_bits = count >= self.LEAST and in_blocks
        for name in ("exp_avg", "exp_avg_sq"):
            dtype = torch.uint8 if has_8_bits else torch.float32
            state[name] = torch.zeros_like(parameter, dtype=dtype)
            if has_8_bits:
                blocks = count // self.BLOCK
                state[f"{name}_scale"] = torch.zeros(blocks, device=parameter.device)

    def _step(
        self,
        weight: Tensor,
        gradient: Tensor,
        mean: Tensor,
        square: Tensor,
        step: Tensor,
        group: dict[str, Any],
    ) -> None:
        """Update weights, and their moments in float32."""
        first, second = group["betas"]
        gradient = gradient.float()
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)

        root = square.div(1 - second**step).sqrt_().add_(group["eps"])
        update = mean.mul(group["lr"] / (1 - first**step)).div_(root)
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update)

    def _decoded(self, codes: Tensor, scale: Tensor, numbers: Tensor) -> Tensor:
        """Return the moments of whole blocks in float32."""
        blocks = numbers[codes.int()].view(-1, self.BLOCK)
        return blocks.mul_(scale[:, None]).view(-1)

    def _encode(self, moments: Tensor, codes: Tensor, scale: Tensor, numbers: Tensor) -> None:
        """Keep the moments of whole blocks in 8 bits."""
        blocks = moments.view(-1, self.BLOCK)
        scale.copy_(blocks.abs().amax(1))
        blocks = blocks / scale.clamp(min=1e-30)[:, None]
        between = (numbers[1:] + numbers[:-1]) / 2
        codes.copy_(torch.bucketize(blocks, between, out_int32=True).view(-1))


def numbers_of_8_bits(*, signed: bool) -> list[float]:
    """Return the 256 numbers from -1 or 0 to 1 of dynamic tree quantization, in ascending order.

    Dettmers 2016, "8-Bit Approximations for Parallelism in Deep Learning", section 3: the larger a
    power of ten, the more bits are left for the fraction.
    """
    numbers = [0.0, 1.0]
    for bits in range(7):
        count = 2**bits if signed else 2 ** (bits + 1)
        width = 0.9 / count
        fractions = [0.1 + width * (number + 0.5) for number in range(count)]
        numbers += [10.0 ** (bits - 6) * fraction for fraction in fractions]
        if signed:
            numbers += [-(10.0 ** (bits - 6)) * fraction for fraction in fractions]

    return sorted(numbers)


def _config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(Path(__file__).parent)


def _class(config: Any) -> Any:
    import transformers

    return getattr(transformers, config.architectures[0])
