"""CUDA's autocast, followed on the CPU where PyTorch sees no CUDA, against its documentation and
its header.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from planner.model.capture.cuda_autocast import OPERATIONS, rules_of
from planner.model.capture.fake import device_rules
from planner.model.options import autocasting

Operation = Callable[[Tensor, Tensor], Tensor]  # of a half and a float32 tensor of 4 x 4


def _image(x: Tensor) -> Tensor:
    return x.view(1, 4, 2, 2)


# https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float16
LOWER: dict[str, Operation] = {
    "matmul": lambda half, full: full @ full,
    "linear": F.linear,
    "conv2d": lambda half, full: F.conv2d(_image(full), full[:, :, None, None]),
    "baddbmm": lambda half, full: torch.baddbmm(full[None], full[None], full[None]),
    "prelu": lambda half, full: F.prelu(half, torch.ones(1, device=half.device)),
    "einsum": lambda half, full: torch.einsum("ij,jk->ik", half, full),
    "attention": lambda half, full: F.scaled_dot_product_attention(
        full[None], full[None], full[None]
    ),
    "gru": lambda half, full: torch.nn.GRU(4, 4, device=full.device)(full[None])[0],
    "lstm": lambda half, full: torch.nn.LSTM(4, 4, device=full.device)(full[None])[0],
}
# ...#cuda-ops-that-can-autocast-to-float32
FLOAT32: dict[str, Operation] = {
    "softmax": lambda half, full: half.softmax(1),
    "log_softmax": lambda half, full: half.log_softmax(1),
    "layer_norm": lambda half, full: F.layer_norm(half, (4,)),
    "group_norm": lambda half, full: F.group_norm(_image(half), 2),
    "exp": lambda half, full: half.exp(),
    "log": lambda half, full: half.log(),
    "pow": lambda half, full: half**2.5,
    "rsqrt": lambda half, full: half.rsqrt(),
    "cumsum": lambda half, full: half.cumsum(1),
    "sum": lambda half, full: half.sum(1),
    "prod": lambda half, full: half.prod(1),
    "norm": lambda half, full: half.norm(),
    "cosine_similarity": lambda half, full: F.cosine_similarity(half, half),
    "mse_loss": lambda half, full: F.mse_loss(half, half),
    "smooth_l1_loss": lambda half, full: F.smooth_l1_loss(half, half),
    "cross_entropy": lambda half, full: F.cross_entropy(half, half.argmax(1)),
    "with_logits": lambda half, full: F.binary_cross_entropy_with_logits(half, full),
    "softplus": lambda half, full: F.softplus(half),
    "cdist": lambda half, full: torch.cdist(half, half),
}
# ...#cuda-ops-that-promote-to-the-widest-input-type
WIDEST: dict[str, Operation] = {
    "cat": lambda half, full: torch.cat([half, full]),
    "stack": lambda half, full: torch.stack([half, full]),
    "addcdiv": lambda half, full: torch.addcdiv(half, full, full),
    "addcmul": lambda half, full: torch.addcmul(half, full, full),
    "atan2": torch.atan2,
    "bilinear": lambda half, full: F.bilinear(half, full, full[None].expand(3, 4, 4)),
    "dot": lambda half, full: torch.dot(half[0], full[0]),
    "index_put": lambda half, full: full.index_put((full[0].argmax()[None],), half[0]),
    "scatter_add": lambda half, full: full.scatter_add(0, full.argsort(0), half),
}
# Not listed: they keep the type that they are given.
KEPT: dict[str, Operation] = {
    "relu": lambda half, full: half.relu(),
    "gelu": lambda half, full: F.gelu(half),
    "sigmoid": lambda half, full: half.sigmoid(),
    "mean": lambda half, full: half.mean(1),
    "dropout": lambda half, full: F.dropout(half, 0.5),
    "batch_norm": lambda half, full: F.batch_norm(_image(half), None, None, training=True),
    "max_pool": lambda half, full: F.max_pool2d(_image(half), 2),
}
EXPECTED = {"half": LOWER | KEPT, "full": FLOAT32 | WIDEST}


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_documented_rules(dtype: torch.dtype) -> None:
    with (
        device_rules("cuda") as device,
        FakeTensorMode(allow_non_fake_inputs=True),
        autocasting(device.type, dtype),
    ):
        half, full = (
            torch.rand(4, 4, dtype=each, device=device) for each in (dtype, torch.float32)
        )
        for kind, operations in EXPECTED.items():
            wanted = dtype if kind == "half" else torch.float32
            found = {name: operation(half, full) for name, operation in operations.items()}
            assert {name: made.dtype for name, made in found.items()} == dict.fromkeys(
                operations, wanted
            )
            assert {made.device for made in found.values()} == {device}
        assert half.sum(dtype=torch.float64).dtype == torch.float64
        assert (full.double() @ full.double()).dtype == torch.float64
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(half, half)
        with torch.autocast(device.type, enabled=False):
            assert (full @ full).dtype == torch.float32


def test_the_rules_are_those_of_the_header() -> None:
    """The installed version's; those of binary cross-entropy and norms are written out there."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8")

    def listed(macro: str) -> set[str]:
        match = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text)
        assert match is not None, macro
        return {entry.replace(", ", ".") for entry in re.findall(r"_\((\w+(?:, \w+)?)\)", match[1])}

    ruled = {rule: set(names.split()) for rule, names in OPERATIONS.items()}
    assert ruled["half"] == listed("AT_FORALL_LOWER_PRECISION_FP")
    assert ruled["single"] == listed("AT_FORALL_FP32")
    assert ruled["widest"] == listed("AT_FORALL_PROMOTE")
    norms = {"norm.Scalar", "norm.ScalarOpt_dim"}
    assert ruled["single by default"] - norms == listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    # No graph has those of cuDNN, which other operations call.
    known = {name for name in rules_of("CUDA") if not name.startswith("cudnn_")}
    assert known == set().union(*ruled.values())


def test_the_rules_of_the_cpu_are_back_afterwards() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            with device_rules("cuda") as device:
                if device.type == "cpu":
                    assert half.exp().dtype == torch.float32
            assert half.exp().dtype == torch.bfloat16
