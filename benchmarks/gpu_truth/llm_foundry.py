"""Equal runs on 8 H100 and on 8 A100 of 80 GB: how much faster is an H100 in training?

python -m benchmarks.gpu_truth.llm_foundry

The rows are those of mosaicml/llm-foundry (Apache-2.0, `scripts/train/benchmarking/README.md`) that
both GPUs ran with the same model, tokens and microbatch: MPT in bfloat16 under FSDP. Kernels of one
replica are estimated; collectives are taken to hide behind them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean, median

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu_truth.by_layers import both_ways
from benchmarks.gpu_truth.calibrated import calibrated
from benchmarks.gpu_truth.gpt import Gpt, Layer, norm
from benchmarks.gpu_truth.rows import Prediction, Row, device
from benchmarks.gpu_truth.summary import Summary, summary
from planner.profiler.estimated.devices import DeviceSpec
from planner.profiler.estimated.execution import cuda_operations
from planner.profiler.estimated.roofline import Costs

_GPUS, _VOCABULARY, _HEAD = 8, 50368, 128
A100, H100 = device("a100-80gb"), device("h100")
SHARES = tuple(share / 1000 for share in range(400, 1000, 5))


@dataclass(frozen=True)
class Pair:
    """Two runs that differ in the GPU alone; seconds are those of a microbatch."""

    gpt: Gpt
    samples: int
    recomputed: bool
    h100_s: float
    a100_s: float

    def seconds(self, spec: DeviceSpec) -> float:
        """Estimate a microbatch on one GPU."""
        forward, backward = (
            each.seconds(spec).sum() for each in _kernels(self.gpt, Layer, self.samples)
        )
        head_s = sum(each.seconds(spec).sum() for each in _kernels(self.gpt, _Head, self.samples))
        # The loss is one kernel each way: it reads the logits, and writes their gradient.
        logits = self.gpt.seq * self.samples * self.gpt.vocab
        loss_s = 8 * logits / (spec.bandwidth_bytes_per_s * spec.achieved_bandwidth["pointwise"])
        return float(
            self.gpt.layers * ((1 + self.recomputed) * forward + backward) + head_s + loss_s
        )

    def error(self, spec: DeviceSpec) -> float:
        """Return the relative error of the microbatch's estimate on one of the two GPUs."""
        return self.seconds(spec) / (self.a100_s if spec is A100 else self.h100_s) - 1

    def share(self) -> float:
        """Return the share of its peak with which the H100's estimate is as far off as the
        A100's.
        """
        error = self.a100_s / self.seconds(A100)
        return min(
            SHARES, key=lambda share: abs(self.h100_s / self.seconds(with_share(share)) - error)
        )


def with_share(share: float) -> DeviceSpec:
    """Return an H100 whose products reach another share of its peak."""
    return replace(H100, achieved_arithmetic={**H100.achieved_arithmetic, "gemm": share})


def pairs() -> Iterator[Pair]:
    """Yield the runs."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            layers, hidden, tokens, samples = (
                int(row[name]) for name in ("layers", "hidden", "tokens", "microbatch")
            )
            gpt = Gpt(
                "mpt",
                layers,
                hidden,
                hidden // _HEAD,
                4 * hidden,
                _VOCABULARY,
                tokens,
                biases=False,
                flash=True,
            )
            rates = (int(row[f"{gpu}_tokens_per_s"]) for gpu in ("h100", "a100"))
            seconds = (_GPUS * samples * tokens / rate for rate in rates)
            yield Pair(gpt, samples, row["recomputed"] == "1", *seconds)


def on_others(gpu: str, spec: DeviceSpec) -> Summary:
    """Return what one GPU's rows are off by, as they are and calibrated on others, those of other
    models too.
    """
    rows = []
    for pair in pairs():
        job, plan = (
            f"{pair.gpt.layers} x {pair.gpt.hidden}",
            f"{pair.gpt.seq} tokens, microbatch {pair.samples}",
        )
        measured_s = pair.a100_s if spec is A100 else pair.h100_s
        rows.append(Row(gpu, job, plan, measured_s, partial(_predict, pair), spec=spec).now())
    return summary(calibrated(rows))


def _predict(pair: Pair, spec: DeviceSpec) -> Prediction:
    return Prediction(pair.seconds(spec))


class _Head(nn.Module):
    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.norm, self.linear = norm(gpt), nn.Linear(gpt.hidden, gpt.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.norm(x))
        return result


@cache
def _kernels(gpt: Gpt, kind: type[nn.Module], samples: int) -> tuple[Costs, Costs]:
    """Trace a block's forward and backward without data."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(), cuda_operations():
            block, x = kind(gpt), torch.empty(gpt.seq, samples, gpt.hidden, requires_grad=True)
            recorder = both_ways(block, x)
    finally:
        torch.set_default_dtype(usual)
    start, middle, end = recorder.until
    return Costs(recorder.operations[start:middle]), Costs(recorder.operations[middle:end])


def main() -> None:
    """Print a row per pair as Markdown, and what all of them say."""
    lines, ratios, shares, errors = list[list[str]](), list[float](), list[float](), list[float]()
    for pair in pairs():
        gpt, measured = pair.gpt, pair.a100_s / pair.h100_s
        a100_s, h100_s = pair.seconds(A100), pair.seconds(H100)
        error = pair.a100_s / a100_s - 1
        ratios, shares, errors = [*ratios, measured], [*shares, pair.share()], [*errors, error]
        name = f"{gpt.layers} x {gpt.hidden}, {gpt.seq} tokens, {pair.samples}"
        cells = [name, f"{measured:.2f}", f"{a100_s / h100_s:.2f}", f"{error:+.0%}"]
        lines.append([*cells, f"{pair.h100_s / h100_s - 1:+.0%}", f"{shares[-1]:.3f}"])
    headers = [
        "model",
        "A100 / H100 measured",
        "estimated",
        "A100 takes longer",
        "H100 takes longer",
        "share",
    ]
    print(tabulate(lines, headers=headers, tablefmt="pipe", disable_numparse=True))
    short = [share for share, pair in zip(shares, pairs(), strict=True) if pair.gpt.seq <= 4096]
    print(
        f"mean ratio {mean(ratios):.2f}, median share {median(shares):.3f}, up to 4,096 tokens "
        f"{median(short):.3f}"
    )
    for gpu, spec in (("A100", A100), ("H100", H100)):
        for name, tokens in (("up to 4,096 tokens", range(4097)), ("more", range(4097, 10**6))):
            found = [pair.error(spec) for pair in pairs() if pair.gpt.seq in tokens]
            print(
                f"{gpu}, {name}: {len(found)} rows, median error {median(map(abs, found)):.1%}, "
                f"{median(found):+.1%}"
            )
        own = on_others(gpu, spec)
        print(
            f"{gpu}: mean error {own.mean_error:.1%}, calibrated on other rows "
            f"{own.calibrated:.1%}, "
            f"on other models {own.by_job:.1%}"
        )


if __name__ == "__main__":
    main()
