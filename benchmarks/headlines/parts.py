"""Measure the headline numbers, a part at a time: each returns its numbers by name, or says why it
cannot run here.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from benchmarks.headlines.numbers import Number
from benchmarks.kept import ROOT
from benchmarks.processes import plan, run

VGG16 = ROOT / "profiles" / "vgg16" / "cpu.json"
LIMIT_S = 5.0
QUESTIONS = ("fit", "llama-70b", "--gpu", "a100-80gb", "--gpus")
SOURCES = (
    "vtrain",
    "mist",
    "aceso a100",
    "aceso a10g",
    "aceso l4",
    "calculon",
    "galvatron",
    "sailor",
    "dgxc",
)
# Which the means over all leave out: on links that are not what their data sheet says, where errors
# are known and not yet small, and schedules by measured stage times.
APART_SOURCES = (
    "amp",
    "amp v100",
    "bigscience",
    "bigscience by data sheet",
    "vocab-parallel",
    "vocab-parallel by estimate",
    "primus",
)
SCHEDULES = ("1f1b", "2bw", "1f1b-flush")
TESTBED_CASES, TESTBED_S = 10, 8.0
TWO_CORES_MINUTES = 4.0
QUICKSTARTS = 3  # one run alone was 8% off, the next 23%


class NotHereError(Exception):
    """A part that cannot run here, with the reason."""


def searches() -> dict[str, float]:
    """Time searches as whole processes: a small one, one with a time limit, and 16,384 GPUs."""
    from benchmarks.speed.graphs import chain, nasnet_like
    from planner.formats.profile import save_profile

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = (
            "solve",
            "--profile",
            VGG16,
            "--gpus",
            "4",
            "--bandwidth",
            "1Gbps",
            "-o",
            folder / "plan.json",
        )
        found["search.small"] = statistics.median(plan(*small).cpu_s for _ in range(3))
        for graph in (chain(1000), nasnet_like()):
            path = folder / f"{graph.model}.json"
            save_profile(graph, path)
            many = ("--gpus", "16384", "--bandwidth", "100Gbps", "-o", folder / "plan.json")
            took = plan("solve", "--profile", path, *many)
            found[f"search.{graph.model}"] = took.cpu_s
            found[f"search.{graph.model}.bytes"] = took.peak_bytes
        limited = (
            "--gpus",
            "64",
            "--bandwidth",
            "1Gbps",
            "--schedule",
            "1f1b-flush",
            "--time-limit",
            f"{LIMIT_S:g}s",
        )
        took = plan(
            "solve",
            "--profile",
            folder / "chain_1000.json",
            *limited,
            "-o",
            folder / "plan.json",
            codes=(0, 3),
        )
        found["search.limited"] = max(0.0, took.wall_s - LIMIT_S)
    return found


def large() -> dict[str, float]:
    """Ask how 70 billion parameters fit 64 and 512 GPUs."""
    if importlib.util.find_spec("transformers") is None:
        raise NotHereError("the model is built by transformers, which is not installed")
    found = {}
    for gpus in ("64", "512"):
        with tempfile.TemporaryDirectory() as folder:
            found[f"large.{gpus}"] = plan(*QUESTIONS, gpus, folder=Path(folder)).wall_s
    return found


def start_up() -> dict[str, float]:
    """Time the command's start, and its installation into a fresh environment from what pip has at
    hand.
    """
    found = {
        "start.help": statistics.median(plan("--help").wall_s for _ in range(5)),
        "start.solve": statistics.median(plan("solve", "--help").wall_s for _ in range(5)),
    }
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name) / "venv", Path(name) / "source"
        source.mkdir()
        # pip builds in the source
        for each in ("planner", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
            run(["cp", "-r", ROOT / each, source])
        began = time.perf_counter()
        venv.create(folder, with_pip=True)
        constraints = ROOT / "constraints.txt"
        try:
            run([folder / "bin" / "pip", "install", "-q", "-c", constraints, f"{source}[demo]"])
        except RuntimeError as error:
            raise NotHereError(
                f"nothing can be installed here: {str(error).splitlines()[-1]}"
            ) from None
        found["start.install"] = time.perf_counter() - began
    return found


def host() -> dict[str, float]:
    """Measure what a worker's host spends on a microbatch beyond its stage's operations."""
    script = (
        "import torch; torch.set_num_threads(1)\n"
        "from benchmarks.speed.overhead.__main__ import measure\n"
        "from benchmarks.speed.overhead.cases import CASES\n"
        "for case in CASES: print(case.name, measure(case, 40, 64).total_us, sep='\\t')"
    )
    lines = run([sys.executable, "-c", script]).out.strip().splitlines()
    return {"host.overhead": float(lines[0].rpartition("\t")[2])}


def testbed() -> dict[str, float]:
    """Run ten plans of today's seed on emulated devices, and compare them with their
    predictions.
    """
    from benchmarks.testbed.drawn import draw, measured

    if os.geteuid() != 0:
        raise NotHereError("network namespaces need root")
    seed = int(time.strftime("%Y%m%d"))
    rows = []
    for _, row in measured(draw(seed, TESTBED_CASES), range(TESTBED_CASES), TESTBED_S):
        rows.append(row)
        said = row.failure or f"{row.error:+.1%}"
        print(
            f"  seed {seed}: {row.model} on {row.devices}, {row.plan}: {said}",
            file=sys.stderr,
            flush=True,
        )
    errors = [abs(row.error) for row in rows if not row.failure]
    if not errors:
        raise NotHereError("no case ran")
    return {
        "testbed.median": statistics.median(errors),
        "testbed.worst": max(errors),
        "testbed.ran": len(errors),
    }


def two_cores() -> dict[str, float]:
    """Let ways to train one model on two cores take turns, and compare their rates."""
    from benchmarks.testbed.two_cores.__main__ import compare
    from benchmarks.testbed.two_cores.table import ASYNCHRONOUS, DDP, ONE_PROCESS, ratios

    samples = compare("vgg_like", "loopback", TWO_CORES_MINUTES, counts=(8,))
    pairs = {
        "two_cores.one": (ASYNCHRONOUS, ONE_PROCESS),
        "two_cores.ddp": (ASYNCHRONOUS, DDP),
        "two_cores.torch": ("ours 1f1b-flush, 8 microbatches", "torch 1F1B, 8 microbatches"),
    }
    return {name: statistics.median(ratios(samples, *pair)) for name, pair in pairs.items()}


def quickstart() -> dict[str, float]:
    """Run `plan quickstart` some times: its median speed-up, and how far its worst prediction was
    off.
    """
    runs = [_quickstart() for _ in range(QUICKSTARTS)]
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return found | {"quickstart.error": max(run["quickstart.error"] for run in runs)}


def _quickstart() -> dict[str, float]:
    from planner.demo.quickstart import QuickstartResult

    with tempfile.TemporaryDirectory() as folder:
        done = plan("quickstart", "--json", folder=Path(folder))
    result = QuickstartResult.model_validate_json(done.out)
    rate, other = result.pipeline.samples_per_s, result.data_parallel.samples_per_s
    predicted, predicted_other = (
        result.plan.predicted.samples_per_s,
        result.predicted_data_parallel_samples_per_s,
    )
    if not (rate and other and predicted and predicted_other):
        raise NotHereError("a run was too short to have a rate")
    worst = max(abs(predicted / rate - 1), abs(predicted_other / other - 1))
    return {
        "quickstart.speedup": rate / other,
        "quickstart.error": worst,
        "quickstart.gbps": result.link_bytes_per_s * 8e-9,
        "quickstart.wall": done.wall_s,
    }


def gpus() -> dict[str, float]:
    """Compare estimates with published runs on GPUs."""
    from benchmarks.gpu_truth import nanotron, slow_links
    from benchmarks.gpu_truth.__main__ import APART
    from benchmarks.gpu_truth.__main__ import SOURCES as ROWS
    from benchmarks.gpu_truth.calibrated import calibrated
    from benchmarks.gpu_truth.rows import ANCHORS
    from benchmarks.gpu_truth.summary import summary

    if not ANCHORS.is_dir():
        raise NotHereError("the published measurements are not here")
    rows = calibrated([row.now() for each in ROWS.values() for row in each()])
    of_runs = nanotron.summary(
        nanotron.judge(nanotron.H100, list(nanotron.runs()), nanotron.EAGER), nanotron.H100
    )
    found = {f"gpu.nanotron.{name}": value for name, value in of_runs[1].items()}
    apart = [row.now() for each in APART.values() for row in each()]
    for source in (*SOURCES, *APART_SOURCES):
        said = summary([row for row in (*rows, *apart) if row.source == source])
        values = {
            "rows": float(len(said.rows)),
            "mean": said.mean_error,
            "median": said.median_error,
            "calibrated": said.calibrated,
            "by_job": said.by_job,
            "tau": said.tau,
            "regret": said.regret,
            "worst_regret": said.worst_regret,
            "memory": said.memory_error,
            "worst_memory": said.worst_memory,
        }
        found |= {
            f"gpu.{source}.{key}": value for key, value in values.items() if value is not None
        }
    errors = [abs(row.error) for row in rows if row.error is not None]
    peaks = [abs(predicted / measured - 1) for row in rows for predicted, measured in row.memory]
    means, fitted = _of_sources(found, "mean"), _of_sources(found, "calibrated")
    return found | {
        "gpu.all.least": min(means),
        "gpu.all.most": max(means),
        "gpu.all.mean": statistics.mean(errors),
        "gpu.all.within_15": sum(error <= 0.15 for error in errors) / len(errors),
        "gpu.all.calibrated_least": min(fitted),
        "gpu.all.calibrated_most": max(fitted),
        "gpu.all.regret": max(_of_sources(found, "regret")),
        "gpu.all.memory_within_5": sum(error <= 0.05 for error in peaks) / len(peaks),
        "gpu.all.memory_within_15": sum(error <= 0.15 for error in peaks) / len(peaks),
        "gpu.all.links": slow_links.share_right_or_warned(slow_links.choices()),
    }


def _of_sources(found: Mapping[str, float], key: str) -> list[float]:
    return [found[name] for source in SOURCES if (name := f"gpu.{source}.{key}") in found]


def convergence() -> dict[str, float]:
    """Train the digits in four stages under three schedules, and compare their accuracy with one
    process's.
    """
    from benchmarks.convergence import digits
    from benchmarks.convergence.__main__ import in_pipeline, one_process

    alone = one_process(digits).accuracy
    assert alone is not None
    found = {}
    for schedule in SCHEDULES:
        accuracy = in_pipeline(digits, schedule).accuracy
        assert accuracy is not None
        found[f"convergence.{schedule}"] = accuracy - alone
    return found


PARTS: Mapping[str, Callable[[], dict[str, float]]] = {
    "search": searches,
    "large": large,
    "start": start_up,
    "host": host,
    "testbed": testbed,
    "two_cores": two_cores,
    "quickstart": quickstart,
    "gpu": gpus,
    "convergence": convergence,
}


_Better = Literal["lower", "higher"]
_OF_ALL: Sequence[tuple[str, str, _Better]] = (
    ("least", "mean error of the best source", "lower"),
    ("most", "mean error of the worst source", "lower"),
    ("mean", "mean error of all rows", "lower"),
    ("within_15", "rows within 15%", "higher"),
    ("calibrated_least", "best source, calibrated", "lower"),
    ("calibrated_most", "worst source, calibrated", "lower"),
    ("regret", "regret in the worst source", "lower"),
    ("memory_within_5", "stages' peaks within 5%", "higher"),
    ("memory_within_15", "stages' peaks within 15%", "higher"),
    ("links", "jobs on a data sheet's links with the right choice or a warning", "higher"),
)
_OF_SOURCE: Sequence[tuple[str, str, str, _Better, float]] = (
    ("rows", "rows", ".0f", "higher", 0),
    ("mean", "mean absolute error", ".1%", "lower", 0.001),
    ("median", "median error", ".1%", "lower", 0.001),
    ("calibrated", "calibrated on other rows", ".1%", "lower", 0.001),
    ("by_job", "calibrated on other jobs", ".1%", "lower", 0.001),
    ("tau", "rank correlation", ".2f", "higher", 0.005),
    ("regret", "regret", "+.1%", "lower", 0.001),
    ("worst_regret", "regret in the worst job", "+.1%", "lower", 0.001),
    ("memory", "memory of stages", ".1%", "lower", 0.001),
    ("worst_memory", "memory, worst stage", ".1%", "lower", 0.001),
)

_OF_NANOTRON: Sequence[tuple[str, str, str, _Better, float]] = (
    ("rows", "rows", ".0f", "higher", 0),
    ("median", "median error of speed", ".0%", "lower", 0.01),
    ("worst_job", "median error of the worst job", ".0%", "lower", 0.01),
    ("tau", "rank correlation, mean of the jobs", ".2f", "higher", 0.01),
    ("least_tau", "rank correlation, worst job", ".2f", "higher", 0.01),
    ("regret", "regret, mean of the jobs", "+.1%", "lower", 0.002),
    ("worst_regret", "regret, worst job", "+.0%", "lower", 0.01),
    ("trained_fit", "trained runs predicted to fit", ".1%", "higher", 0.005),
    ("out_of_memory", "runs out of memory predicted not to fit", ".0%", "higher", 0.01),
    ("memory", "mean error of reserved memory", ".0%", "lower", 0.005),
)


def _of_gpus() -> list[Number]:
    of_all = [
        Number(
            f"gpu.all.{key}",
            f"estimates against GPU runs: {what}",
            "estimated",
            ".0%",
            better,
            0.02,
            0.002,
        )
        for key, what, better in _OF_ALL
    ]
    of_sources = [
        Number(f"gpu.{source}.{key}", f"{source}: {what}", "estimated", form, better, 0.02, least)
        for source in (*SOURCES, *APART_SOURCES)
        for key, what, form, better, least in _OF_SOURCE
    ]
    of_runs = [
        Number(
            f"gpu.nanotron.{key}",
            f"nanotron on H100: {what}",
            "estimated",
            form,
            better,
            0.02,
            least,
        )
        for key, what, form, better, least in _OF_NANOTRON
    ]
    return of_all + of_sources + of_runs


# Spreads are what repeated runs of one tree showed on two shared cores; times vary more than
# ratios.
NUMBERS: Sequence[Number] = (
    Number(
        "search.small",
        "plan solve, VGG-16 on 4 GPUs, CPU s",
        "measured",
        ".1f",
        spread=0.25,
        of_machine=True,
    ),
    Number("search.limited", "wall s beyond a limit of 5 s", "measured", ".1f", least=1.5),
    *(
        Number(
            f"search.{name}{key}",
            f"{said} on 16,384 GPUs, {unit}",
            "measured",
            form,
            "lower",
            0.25,
            0,
            not key,
        )
        for name, said in (("chain_1000", "1,000 layers"), ("nasnet_like", "NASNet-like"))
        for key, unit, form in (("", "CPU s", ".1f"), (".bytes", "peak bytes", ".2g"))
    ),
    Number(
        "large.64",
        "plan fit, 70 billion on 64 A100, wall s",
        "measured",
        ".0f",
        spread=0.25,
        of_machine=True,
    ),
    Number(
        "large.512",
        "plan fit, 70 billion on 512 A100, wall s",
        "measured",
        ".0f",
        spread=0.25,
        of_machine=True,
    ),
    Number(
        "start.help",
        "plan --help, wall s",
        "measured",
        ".2f",
        spread=0.5,
        least=0.1,
        of_machine=True,
    ),
    Number(
        "start.solve",
        "plan solve --help, wall s",
        "measured",
        ".2f",
        spread=0.5,
        least=0.1,
        of_machine=True,
    ),
    Number("start.install", "installation, wall s", "measured", ".0f", spread=1.0),
    Number(
        "host.overhead", "host's µs per microbatch", "measured", ".0f", spread=0.25, of_machine=True
    ),
    Number("testbed.median", "median error of ten drawn plans", "emulated", ".1%", least=0.01),
    Number("testbed.worst", "worst error of ten drawn plans", "emulated", ".1%", least=0.03),
    Number("testbed.ran", "of ten drawn plans, ran", "emulated", ".0f", "higher"),
    Number(
        "two_cores.one", "1f1b on two cores over one process", "measured", ".2f", "higher", 0.05
    ),
    Number("two_cores.ddp", "1f1b over DDP", "measured", ".2f", "higher", 0.1),
    Number(
        "two_cores.torch",
        "1f1b-flush over torch's 1F1B, 8 microbatches",
        "measured",
        ".2f",
        "higher",
        0.05,
    ),
    Number("quickstart.speedup", "plan quickstart over DDP", "measured", ".2f", "higher", 0.08),
    Number(
        "quickstart.error",
        "plan quickstart's worst prediction of three runs",
        "measured",
        ".0%",
        least=0.1,
    ),
    Number("quickstart.gbps", "plan quickstart's link, Gbit/s", "measured", ".1f", "higher", 0.5),
    Number(
        "quickstart.wall",
        "plan quickstart, wall s",
        "measured",
        ".0f",
        spread=0.25,
        of_machine=True,
    ),
    *_of_gpus(),
    *(
        Number(
            f"convergence.{name}",
            f"digits, {name}: accuracy beside one process",
            "measured",
            "+.1%",
            "higher",
            0,
            0.01,
        )
        for name in SCHEDULES
    ),
)
