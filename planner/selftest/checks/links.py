"""Do messages and sums arrive between workers of this host, with every backend that it has?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from planner.formats.names import Backend, DeviceType
from planner.profiler.links.measure_cluster import measure_host
from planner.selftest.lab import Lab
from planner.selftest.rows import Case, Check, Outcome, judged, passed, skipped
from planner.selftest.workers.exchange import ROUNDS, SIZES, Exchanged, Task
from planner.selftest.workers.start import run_workers
from planner.units import format_bandwidth, format_bytes, format_seconds


def _cases(lab: Lab) -> Iterator[Case]:
    yield Case("gloo", partial(_gloo, lab))
    yield Case("nccl", partial(_nccl, lab))
    yield Case("speed", partial(_speed, lab))


def _gloo(lab: Lab) -> Outcome:
    return _exchange(lab, "gloo", max(2, lab.workers))


def _nccl(lab: Lab) -> Outcome:
    if not lab.cuda:
        return skipped("NCCL sends from GPUs, and the self-test runs on the CPU")
    if not dist.is_nccl_available():
        return skipped("this PyTorch has no NCCL")
    return _exchange(lab, "nccl", min(lab.workers, torch.cuda.device_count()))


def _exchange(lab: Lab, backend: Backend, workers: int) -> Outcome:
    store = lab.folder / f"store-{backend}"
    task = Task(backend=backend, store=str(store)).model_dump_json()
    module = "planner.selftest.workers.exchange"
    return judge(
        [Exchanged.model_validate_json(text) for text in run_workers(module, lab.folder, task, workers=workers)]
    )


def _speed(lab: Lab) -> Outcome:
    """Measure the link between two workers, as `plan profile` with links does."""
    if lab.workers < 2:
        return skipped("one worker has no links")
    device: DeviceType = "cuda" if lab.cuda else "cpu"
    (level,) = measure_host(2, device, lab.backend(2)).levels
    return passed(
        f"{format_bandwidth(level.bandwidth_bytes_per_s)} each way at once, {format_seconds(level.latency_s)} of "
        f"latency, {format_bandwidth(level.all_reduce_bandwidth_bytes_per_s or 0.0)} in sums"
    )


def judge(found: list[Exchanged]) -> Outcome:
    """Judge what all workers found."""
    wrong = [each.wrong for each in found if each.wrong]
    if wrong:
        return judged(False, wrong[0])
    size = format_bytes(4 * SIZES[-1])
    sums = f"a sum of {size} takes {format_seconds(max(each.all_reduce_s for each in found))}"
    if len(found) == 1:
        return judged(True, f"1 worker: {sums}; messages need a second GPU")
    messages = ROUNDS * len(SIZES) * len(found)
    short, long = (format_seconds(max(times)) for times in zip(*((e.short_s, e.long_s) for e in found), strict=True))
    return judged(True, f"{len(found)} workers: {messages} messages; 4 B take {short}, {size} {long}, {sums}")


CHECK = Check("links", "do messages and sums arrive, with every backend?", _cases)
