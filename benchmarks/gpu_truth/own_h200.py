"""Compare estimates for the H200 with what this program measured on one. See README.md in this
folder.

python -m benchmarks.gpu_truth.own_h200
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from tabulate import tabulate
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from planner.formats.profile import Profile
from planner.model.spec import load_model_file
from planner.profiler.estimated.devices import DEVICES, DType
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.profiler.estimated.execution import cuda_operations
from planner.profiler.estimated.operations import OperationRecorder
from planner.profiler.estimated.roofline import Costs

MEASURED = Path(__file__).with_name("own_h200.json")
_PROFILES = Path(__file__).resolve().parents[2] / "profiles"
_TIMES = ("forward_s", "backward_s", "update_s")
_BYTES = ("saved_bytes", "workspace_bytes")
_LEAST_SHARE = 0.02  # of the layers' time, for a kind to have a line
Sums = Mapping[str, float]


def kinds_of(profile: Profile) -> dict[str, Sums]:
    """Sum the layers of each kind, which have one operation and one name but for its numbers;
    workspaces: the most.
    """
    found: dict[str, dict[str, float]] = {"all": {}}
    for layer in profile.layers:
        for kind in ("all", f"{layer.op} {re.sub('[0-9]+', '#', layer.name)}"):
            sums = found.setdefault(kind, {})
            for name in (*_TIMES, *_BYTES):
                value, before = getattr(layer, name), sums.get(name, 0)
                sums[name] = max(before, value) if name == "workspace_bytes" else before + value
    return cast("dict[str, Sums]", found)


def estimated(case: Mapping[str, Any], host: str | None = None) -> dict[str, Sums]:
    """Return the kinds of a model's layers, estimated as they were measured."""
    options = EstimateOptions("h200", case["dtype"], case["memory_format"], host=host)
    training_spec = load_model_file(_PROFILES / case["model"] / "model.py")
    return kinds_of(estimate_profile(training_spec, case["batch"], options))


def profiles_table(measured: Mapping[str, Any], host: str | None = None) -> str:
    """Return measured and estimated sums per kind of layer: milliseconds and megabytes."""
    cells = []
    for case in measured["profiles"]:
        ours, whole = estimated(case, host), case["whole_step"]
        label = f"{case['model']}, {case['batch']}, {case['dtype']}"
        step = sum(ours["all"][name] for name in _TIMES)
        cells.append([label, "plain PyTorch step", _pair(case["plain_step_s"], step, 1e3)])
        cells.append(
            [label, "whole step", *(_pair(whole[name], ours["all"][name], 1e3) for name in _TIMES)]
        )
        total = sum(case["kinds"]["all"][name] for name in _TIMES)
        for kind, theirs in case["kinds"].items():
            if sum(theirs[name] for name in _TIMES) >= _LEAST_SHARE * total:
                times = [_pair(theirs[name], ours[kind][name], 1e3) for name in _TIMES]
                sizes = [_pair(theirs[name], ours[kind][name], 1e-6) for name in _BYTES]
                cells.append([label, kind, *times, *sizes])
    headers = [
        "model, batch",
        "layers",
        "forward ms",
        "backward ms",
        "update ms",
        "saved MB",
        "workspace MB",
    ]
    return tabulate(cells, headers=headers, tablefmt="pipe", disable_numparse=True)


def _pair(measured: float, estimated: float, scale: float) -> str:
    return f"{scale * measured:.4g} / {scale * estimated:.4g}"


def kernels_table(measured: Mapping[str, Any]) -> str:
    """Return measured and estimated microseconds of kernels, forward."""
    cells = []
    for record in measured["kernels"]:
        ours = kernel_s(record)
        sizes = ", ".join(
            f"{name} {value}" for name, value in record.items() if name not in ("kind", "us")
        )
        error = ours / (record["us"] * 1e-6) - 1
        cells.append(
            [record["kind"], sizes, f"{record['us']:.1f}", f"{1e6 * ours:.1f}", f"{error:+.0%}"]
        )
    return tabulate(
        cells, headers=["kernel", "sizes", "measured µs", "estimated µs", "error"], tablefmt="pipe"
    )


def kernel_s(record: Mapping[str, Any]) -> float:
    """Return the estimated seconds of one kernel that was measured."""
    single: DType = "tf32" if record["dtype"] == "tf32" else "float32"
    dtype = torch.bfloat16 if record["dtype"] == "bfloat16" else torch.float32
    with FakeTensorMode(), cuda_operations():
        run = _call(record, dtype)
        with OperationRecorder(single, gpu=True) as recorder:
            run()
    return float(Costs(recorder.operations).seconds(DEVICES["h200"]).sum())


def _call(record: Mapping[str, Any], dtype: torch.dtype) -> Callable[[], object]:
    """Return what was timed, on tensors of the measured sizes."""
    kind = record["kind"]
    if kind == "product":
        a, b = (torch.empty(record[rows], record["k"], dtype=dtype) for rows in "mn")
        return lambda: F.linear(a, b)
    if kind == "attention":
        q = torch.empty(
            *(record[size] for size in ("batch", "heads", "tokens", "width")), dtype=dtype
        )
        return lambda: F.scaled_dot_product_attention(q, q, q, is_causal=record["causal"])
    if kind == "convolution":
        side, kernel = record["pixels"], record["kernel"]
        x = torch.empty(64, record["inputs"], side, side, dtype=dtype)
        weight = torch.empty(record["outputs"], record["inputs"], kernel, kernel, dtype=dtype)
        return lambda: F.conv2d(x, weight, padding=kernel // 2)
    x, weight = (
        torch.empty(record["rows"], record["width"], dtype=dtype),
        torch.empty(record["width"], dtype=dtype),
    )
    calls: Mapping[str, Callable[[], object]] = {
        "layer_norm": lambda: F.layer_norm(x, weight.shape, weight, weight),
        "rms_norm": lambda: F.rms_norm(x, weight.shape, weight),
        "gelu": lambda: F.gelu(x),
        "softmax": lambda: F.softmax(x, -1),
        "dropout": lambda: F.dropout(x, 0.1),
        "add": lambda: x + 1,  # x was added to itself, which reads it once
        "copy": lambda: x.clone(),
    }
    return calls[kind]


def load() -> dict[str, Any]:
    """Read what was measured."""
    content: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return content


def tables(host: str | None = None) -> Iterator[str]:
    """Yield the tables, as Markdown."""
    measured = load()
    yield profiles_table(measured, host)
    yield kernels_table(measured)


def main() -> None:
    """Print measured beside estimated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--host", help="as of `plan profile --estimate`; the table's where it is not given"
    )
    print("\n\n".join(tables(parser.parse_args().host)))


if __name__ == "__main__":
    main()
