"""Compare estimated profiles with measured ones. See README.md in this folder.

python -m benchmarks.gpu_truth.estimate
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from tabulate import tabulate

from benchmarks.gpu_truth.fit_device import fit
from benchmarks.kept import ROOT
from planner.formats.profile import Profile, load_profile
from planner.model.spec import load_model_file
from planner.profiler.estimated.devices import DEVICES, HOSTS, DeviceSpec, DType
from planner.profiler.estimated.execution import Execution
from planner.profiler.estimated.trace import StepTrace, trace_step

PIPEDREAM = ROOT.parent / "shared" / "anchors" / "pipedream"
# Models of PipeDream's published profiles, and their minibatches, which follow from the sizes of
# activations.
PUBLISHED: tuple[tuple[str, str, int, DType], ...] = (
    ("vgg16", "benchmarks/published/configs/models/vgg16.py", 128, "float32"),
    ("resnet50", "benchmarks/published/configs/models/resnet50.py", 128, "float32"),
    ("alexnet", "profiles/alexnet/model.py", 256, "float32"),
    ("inception_v3", "profiles/inception_v3/model.py", 128, "float32"),
    ("gnmt", "profiles/gnmt8/model.py", 32, "float32"),
    ("gnmt", "profiles/gnmt8/model.py", 32, "float16"),
)
_NODE = re.compile(r"-- (\w+).* -- forward_compute_time=([\d.]+), backward_compute_time=([\d.]+)")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """A measured profile and a trace of the same step."""

    name: str
    profile: Profile
    trace: StepTrace


def rank_correlation(one: Floats, other: Floats) -> float:
    """Return Spearman's correlation of ranks; ties have their mean rank."""
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse], dtype=np.float64)


def errors(sample: Sample, spec: DeviceSpec) -> list[str]:
    """Return the errors of total, forward, backward and update; the layers' median error; their
    rank correlation.
    """
    estimated = np.array(sample.trace.layer_seconds(spec))
    layers = sample.profile.layers
    measured = np.array(
        [
            [getattr(layer, part) for layer in layers]
            for part in ("forward_s", "backward_s", "update_s")
        ]
    )
    total = estimated.sum() / measured.sum() - 1
    parts = [
        f"{mine / theirs - 1:+.0%}"
        for mine, theirs in zip(estimated.sum(1), measured.sum(1), strict=True)
    ]
    by_layer, theirs_by_layer = estimated.sum(0), measured.sum(0)
    median = np.median(np.abs(by_layer / theirs_by_layer - 1))
    return [
        f"{total:+.1%}",
        *parts,
        f"{median:.0%}",
        f"{rank_correlation(by_layer, theirs_by_layer):.3f}",
    ]


def measured_table(samples: Sequence[Sample], device: str) -> str:
    """Return the errors with the table's shares, and with shares fitted to the other models."""
    rows = []
    for sample in samples:
        others = [(other.trace, other.profile) for other in samples if other is not sample]
        ways = [("table", DEVICES[device])]
        if others:
            ways.append(("calibrated on the others", fit(DEVICES[device], others)))
        ways.append(
            ("calibrated on itself", fit(DEVICES[device], [(sample.trace, sample.profile)]))
        )
        head = f"{sample.name}, {sample.profile.microbatch_size}"
        rows += [
            [head, way, len(sample.profile.layers), *errors(sample, spec)] for way, spec in ways
        ]
    headers = ["model, batch", "shares", "layers", "total", "forward", "backward", "update"]
    headers += ["median layer", "rank correlation"]
    return tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True)


def published_table() -> str:
    """Return the errors against the times of PipeDream's profiles, with the table's V100."""
    rows = []
    # GNMT ran in float16 without autocast, whose casts make most of the launches here: the host is
    # left out.
    spec = replace(DEVICES["v100"], dispatch_s=HOSTS["graphs"])
    for name, path, batch_size, dtype in PUBLISHED:
        nodes = [
            _NODE.search(line)
            for line in (PIPEDREAM / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        ]
        found = [node for node in nodes if node is not None and not node[1].startswith("Input")]
        theirs = [sum(float(node[part]) for node in found) for part in (2, 3)]
        trace = trace_step(
            load_model_file(ROOT / path), batch_size, dtype, execution=Execution("cuda")
        )
        forward, backward, _ = trace.layer_seconds(spec)
        ours = [sum(forward) * 1e3, sum(backward) * 1e3]
        change = sum(ours) / sum(theirs) - 1
        times = [f"{value:.0f}" for pair in zip(theirs, ours, strict=True) for value in pair]
        rows.append([f"{name}, {batch_size}, {dtype}", *times, f"{change:+.0%}"])
    headers = [
        "model, batch, type",
        "forward ms, published",
        "estimated",
        "backward ms, published",
        "estimated",
        "total",
    ]
    return tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True)


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cpu", choices=sorted(DEVICES), help="takes profiles/*/DEVICE.json"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples = []
    for path in sorted(ROOT.glob(f"profiles/*/{arguments.device}.json")):
        profile = load_profile(path)
        if profile.microbatch_size is None:
            continue
        trace = trace_step(
            load_model_file(path.parent / "model.py"),
            profile.microbatch_size,
            execution=Execution(DEVICES[arguments.device].kind),
        )
        if trace.graph.hash != profile.graph_hash:
            print(f"{path} is not of its model file: left out")
            continue
        samples.append(Sample(path.parent.name, profile, trace))
    print(
        json.dumps(
            {
                "date": time.strftime("%Y-%m-%d"),
                "python": platform.python_version(),
                "torch": torch.__version__,
            }
        )
    )
    print(measured_table(samples, arguments.device))
    fitted = fit(DEVICES[arguments.device], [(s.trace, s.profile) for s in samples])
    print(f"\n{json.dumps(shares(fitted))}\n")
    print(
        published_table()
        if PIPEDREAM.is_dir()
        else f"without {PIPEDREAM}: no published profiles to compare with"
    )


def shares(spec: DeviceSpec) -> dict[str, object]:
    """Return the fitted shares, rounded."""
    return {
        "arithmetic": {name: round(value, 3) for name, value in spec.achieved_arithmetic.items()},
        "bandwidth": {name: round(value, 3) for name, value in spec.achieved_bandwidth.items()},
        "launch_s": round(spec.launch_s, 8),
    }


if __name__ == "__main__":
    main()
