"""What the host takes to launch a kernel: a transformer so small that the GPU waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, BLOCKS, SAMPLES, TOKENS = 64, 4, 12, 2, 32
PRECISIONS = ("float32", "autocast to bfloat16", "bfloat16")
ADDS = 1000


@dataclass(frozen=True)
class Row:
    """One call: seconds until the host is done, until the GPU is, and those of the kernels
    themselves.
    """

    host_s: float
    wall_s: float | None  # None: not kept
    launches: int
    kernels_s: float | None


class Block(nn.Module):
    """A transformer's block: attention and two linear layers, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(WIDTH, 2)
        )
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        )
        x = x + self.out(attended)
        down: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + down


def measure(show: Callable[[str, Row], None]) -> None:
    """Time forward, backward and updates in each precision, and an addition in a loop."""
    torch.set_num_threads(1)
    ones = torch.ones(WIDTH, device="cuda")
    adds = partial(_adds, ones)
    host_s, wall_s = _timed(adds, 20)
    show(f"{ADDS} additions in place", Row(host_s, wall_s, *_launches(adds)))
    for precision in PRECISIONS:
        for what, call in _calls(precision).items():
            host_s, wall_s = _timed(call)
            show(f"{precision}: {what}", Row(host_s, wall_s, *_launches(call)))


def _adds(ones: Tensor) -> None:
    for _ in range(ADDS):
        ones.add_(1)


def _calls(precision: str) -> dict[str, Callable[[], object]]:
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).cuda()
    batch = torch.randn(SAMPLES, TOKENS, WIDTH, device="cuda")
    if precision == "bfloat16":
        model, batch = model.bfloat16(), batch.bfloat16()

    def casting() -> AbstractContextManager[object]:
        return (
            torch.autocast("cuda", torch.bfloat16)
            if precision.startswith("autocast")
            else nullcontext()
        )

    def forward() -> Tensor:
        with casting():
            loss: Tensor = model(batch).float().sum()
        return loss

    def forward_only() -> None:
        with torch.no_grad():
            forward()

    def both() -> None:
        model.zero_grad()
        forward().backward()  # type: ignore[no-untyped-call]

    return {
        "forward without autograd": forward_only,
        "forward": forward,
        "forward and backward": both,
        "AdamW, foreach": torch.optim.AdamW(model.parameters(), foreach=True).step,
        "AdamW, fused": torch.optim.AdamW(model.parameters(), fused=True).step,
    }


def _timed(call: Callable[[], object], times: int = 30) -> tuple[float, float]:
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    host_s = time.perf_counter() - began
    torch.cuda.synchronize()
    return host_s / times, (time.perf_counter() - began) / times


def _launches(call: Callable[[], object]) -> tuple[int, float]:
    """Return the kernels that a call launches, and their seconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    events = profiler.events() or []
    launches = sum(event.name.startswith("cu") and "Launch" in event.name for event in events)
    return launches, sum(event.self_device_time_total for event in events) / 1e6
