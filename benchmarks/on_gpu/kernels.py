"""What share of the data sheet's peaks kernels reach: products, attention, convolutions, and what
moves memory.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FILE = "kernels.csv"
FLOPS, BYTES = "TFLOP/s", "GB/s"

SQUARE = tuple((size, size, size) for size in (4096, 8192, 2048, 1024))
GPT2_MLP = ((4096, 768, 3072), (4096, 3072, 768))
PRODUCTS = (  # rows, inputs, outputs
    *SQUARE,
    *GPT2_MLP,
    (512, 512, 512),
    (4096, 768, 2304),
    (4096, 768, 768),
    (4096, 768, 50257),
    (16384, 1024, 4096),
    (16384, 4096, 1024),
    (2048, 4096, 11008),
    (8192, 4096, 4096),
    (8192, 8192, 1024),
    (1024, 8192, 8192),
    (32768, 768, 3072),
)
ATTENTION = (  # samples, heads, tokens, width of a head
    (4, 12, 1024, 64),
    (2, 32, 2048, 128),
    (1, 32, 8192, 128),
    (32, 12, 128, 64),
    (8, 16, 512, 64),
    (2, 32, 4096, 64),
)
ROWS = ((4096, 768), (16384, 4096), (8192, 8192), (65536, 1024))
# in, out, size, kernel
CONVOLUTIONS = ((64, 64, 56, 3), (256, 64, 56, 1), (128, 128, 28, 3), (512, 512, 7, 3))
IMAGES = 64
PARAMETERS = (10**7, 10**8)


@dataclass(frozen=True)
class Row:
    """Median µs of a forward and a backward, and the rates that they are by the counts in
    `README.md`.
    """

    kind: str
    dtype: str
    shape: str
    forward_us: float
    backward_us: float | None
    forward_rate: float
    backward_rate: float | None
    unit: str


@dataclass(frozen=True)
class Kept:
    """How many rows the file of kernels has; says in `results.json` when and where they were
    measured.
    """

    rows: int


def measure(show: Callable[[Row], None]) -> None:
    """Time every kernel, its caches cold."""
    for part in (_products, _attention, _rows, _updates, _convolutions):
        for row in part():
            show(row)


def write(rows: list[Row], path: Path) -> None:
    """Write rows as CSV, with three decimals."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Row)])
        for row in rows:
            writer.writerow(
                [f"{x:.3f}" if isinstance(x, float) else x for x in asdict(row).values()]
            )


def read(path: Path) -> list[Row]:
    """Read the rows that `write` wrote."""

    def row(values: dict[str, str]) -> Row:
        number = {
            name: float(text) if text else None
            for name, text in values.items()
            if name[-3:] in ("_us", "ate")
        }
        return Row(**{**values, **number})  # type: ignore[arg-type]

    with path.open(newline="", encoding="utf-8") as file:
        return [row(values) for values in csv.DictReader(file)]


def _us(call: Callable[[], object]) -> float:
    """Return the median µs of a call, with the L2 cache overwritten before each."""
    milliseconds: float = import_module("triton.testing").do_bench(
        call, warmup=15, rep=60, return_mode="median"
    )
    return milliseconds * 1e3


def _backward_us(output: Tensor, inputs: tuple[Tensor, ...]) -> float:
    gradient = torch.randn_like(output)
    return _us(lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True))


def _parameter(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def _products() -> Iterator[Row]:
    for dtype, name in (
        (torch.bfloat16, "bfloat16"),
        (torch.float32, "tf32"),
        (torch.float32, "float32"),
    ):
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        for rows, inputs, outputs in PRODUCTS if name == "bfloat16" else (*SQUARE, *GPT2_MLP):
            x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
            weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype)
            us = _us(lambda x=x, weight=weight: F.linear(x, weight))  # type: ignore[misc]
            rate = 2 * rows * inputs * outputs / us / 1e6
            yield Row(
                "product", name, f"{rows} x {inputs} x {outputs}", us, None, rate, None, FLOPS
            )
    torch.backends.cuda.matmul.allow_tf32 = False


def _attention() -> Iterator[Row]:
    for samples, heads, tokens, width in ATTENTION:
        for causal in (True, False):
            shape = (samples, heads, tokens, width)
            q, k, v = (_parameter(*shape, dtype=torch.bfloat16) for _ in range(3))

            def forward(
                q: Tensor = q, k: Tensor = k, v: Tensor = v, causal: bool = causal
            ) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            flops = 4 * samples * heads * tokens * tokens * width * (0.5 if causal else 1)
            there, back = _us(forward), _backward_us(forward(), (q, k, v))
            kind = "causal attention" if causal else "attention"
            rates = flops / there / 1e6, 2.5 * flops / back / 1e6
            yield Row(kind, "bfloat16", " x ".join(map(str, shape)), there, back, *rates, FLOPS)


def _rows() -> Iterator[Row]:
    for rows, width in ROWS:
        for dtype in (torch.bfloat16, torch.float32):
            x, weight, bias = (
                _parameter(rows, width, dtype=dtype),
                *(_parameter(width, dtype=dtype) for _ in "wb"),
            )
            size = rows * width * x.element_size()
            for kind, (forward, inputs) in _row_wise(x, weight, bias).items():
                there = _us(forward)
                back = _backward_us(forward(), inputs) if inputs else None
                rate = None if back is None else 3 * size / back / 1e3
                name = str(dtype).removeprefix("torch.")
                yield Row(
                    kind,
                    name,
                    f"{rows} x {width}",
                    there,
                    back,
                    2 * size / there / 1e3,
                    rate,
                    BYTES,
                )


def _row_wise(
    x: Tensor, weight: Tensor, bias: Tensor
) -> dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]]:
    width = x.shape[-1:]
    return {
        "layer norm": (lambda: F.layer_norm(x, width, weight, bias), (x, weight, bias)),
        "RMS norm": (lambda: F.rms_norm(x, width, weight), (x, weight)),
        "GELU": (lambda: F.gelu(x), (x,)),
        "softmax": (lambda: F.softmax(x, -1), (x,)),
        "dropout": (lambda: F.dropout(x, 0.1), (x,)),
        "addition": (lambda: x + x, (x,)),
        "copy": (lambda: x.detach().clone(), ()),
    }


def _updates() -> Iterator[Row]:
    for count in PARAMETERS:
        parameters = [
            torch.nn.Parameter(torch.randn(count // 10, device="cuda")) for _ in range(10)
        ]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for kind in ("foreach", "fused"):
            options: dict[str, Any] = {kind: True}
            optimizer = torch.optim.AdamW(parameters, **options)
            optimizer.step()
            us = _us(optimizer.step)
            yield Row(
                f"AdamW {kind}", "float32", str(count), us, None, 28 * count / us / 1e3, None, BYTES
            )


def _convolutions() -> Iterator[Row]:
    layouts = {
        "convolution": torch.contiguous_format,
        "convolution, channels last": torch.channels_last,
    }
    for kind, layout in layouts.items():
        for dtype, name in ((torch.float32, "tf32"), (torch.bfloat16, "bfloat16")):
            for inputs, outputs, size, kernel in CONVOLUTIONS:
                images, weight = (
                    torch.randn(*shape, device="cuda", dtype=dtype)
                    .to(memory_format=layout)
                    .requires_grad_()
                    for shape in ((IMAGES, inputs, size, size), (outputs, inputs, kernel, kernel))
                )

                def forward(
                    images: Tensor = images, weight: Tensor = weight, kernel: int = kernel
                ) -> Tensor:
                    return F.conv2d(images, weight, padding=kernel // 2)

                flops = 2 * IMAGES * outputs * inputs * (kernel * size) ** 2
                there, back = _us(forward), _backward_us(forward(), (images, weight))
                rates = flops / there / 1e6, 2 * flops / back / 1e6
                shape = f"{inputs} to {outputs}, {size} x {size}, kernel {kernel}"
                yield Row(kind, name, shape, there, back, *rates, FLOPS)
