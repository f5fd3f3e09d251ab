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
STATES = "float32"  # of AdamW's moments; "bfloat16" takes half the memory
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


def _config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(Path(__file__).parent)


def _class(config: Any) -> Any:
    import transformers

    return getattr(transformers, config.architectures[0])
