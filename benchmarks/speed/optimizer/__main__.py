"""Compare the solver's speed with that of the published optimizer. See README.md in this folder.

python -m benchmarks.speed.optimizer
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.kept import ANCHORS, printed
from benchmarks.published.cost_models import PublishedPlan, solve_published
from benchmarks.published.graph_txt import load_graph_txt
from benchmarks.speed.graphs import chain
from benchmarks.speed.optimizer.published import ChainLayer, best_time_s
from planner.formats.profile import Profile

PUBLISHED = ANCHORS / "pipedream"
BANDWIDTH_BYTES_PER_S = 1.25e9
REPEATS = 5


def main() -> None:
    """Measure both, and print the tables as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, default=1500, help="of the long chain (default: %(default)s)"
    )
    parser.add_argument("--chain-gpus", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument(
        "--longest-s", type=float, default=60.0, help="of one run of the published programme"
    )
    parser.add_argument(
        "--save", action="store_true", help="write what is printed to results.md beside this"
    )
    arguments = parser.parse_args()
    with printed(Path(__file__).parent, save=arguments.save):
        if PUBLISHED.is_dir():
            _published_profiles()
        else:
            print(
                f"The published profiles are not beside the project ({PUBLISHED.name}): left out.\n"
            )
        _chains(arguments.layers, arguments.chain_gpus, arguments.longest_s)


def _published_profiles() -> None:
    print(
        "| profile | GPUs | theirs, s | ours in a process, s | ratio | our whole process, s | "
        "ratio | answer |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for run in json.loads((PUBLISHED / "reference.json").read_text())["runs"]:
        if len(run["gpus_per_level"]) > 1:
            continue
        path, gpus, theirs_s = (
            PUBLISHED / f"{run['profile']}.txt",
            run["gpus_per_level"][0],
            run["wall_s"],
        )
        plan, inside_s = _solved(load_graph_txt(path), gpus)
        whole_s = _whole_process_s(path, gpus)
        more = "" if run["finished"] else ">"
        answer = f"{plan.seconds:.6f} s, {'optimal' if plan.optimal else 'feasible'}"
        if run["finished"]:
            answer += f" (theirs {run['time_per_minibatch_s']:.6f} s)"
        print(
            f"| {run['profile']} | {gpus} | {more}{theirs_s} | {inside_s:.3f} | "
            f"{more}{theirs_s / inside_s:.0f} "
            f"| {whole_s:.2f} | {more}{theirs_s / whole_s:.1f} | {answer} |",
            flush=True,
        )
    print()


def _solved(profile: Profile, gpus: int) -> tuple[PublishedPlan, float]:
    """Return the plan and the median processor time, after one run to warm up."""
    plan = solve_published(profile, gpus, BANDWIDTH_BYTES_PER_S)
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        solve_published(profile, gpus, BANDWIDTH_BYTES_PER_S)
        seconds.append(time.process_time() - started)
        if sum(seconds) > 10:
            break
    return plan, sorted(seconds)[len(seconds) // 2]


def _whole_process_s(path: Path, gpus: int) -> float:
    """Return the processor time of a process that solves it, from the start of the interpreter to
    its end.
    """
    program = (
        "from benchmarks.published.graph_txt import load_graph_txt; "
        "from benchmarks.published.cost_models import solve_published"
    )
    program += (
        f"; print(solve_published(load_graph_txt({str(path)!r}), {gpus}, {BANDWIDTH_BYTES_PER_S}))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _chains(layers: int, gpu_counts: list[int], longest_s: float) -> None:
    print(f"Chain of {layers} layers:\n")
    print("| GPUs | published programme, s | ours in a process, s | ratio |")
    print("|---|---|---|---|")
    sizes, per_step_s = _measured_growth(longest_s)
    for gpus in gpu_counts:
        theirs_s = per_step_s * _steps(layers, gpus)
        _, ours_s = _solved(chain(layers), gpus)
        print(
            f"| {gpus} | {theirs_s:,.0f} (extrapolated) | {ours_s:.2f} | {theirs_s / ours_s:,.0f} "
            f"|",
            flush=True,
        )
    print(f"\nMeasured, to extrapolate from: {sizes}")


def _measured_growth(longest_s: float) -> tuple[str, float]:
    """Run the published programme at growing sizes, check its answers, and return seconds per step
    at the largest.
    """
    texts, per_step_s = [], 0.0
    for layers, gpus in ((50, 8), (100, 8), (100, 16), (200, 16), (400, 16), (800, 16)):
        if per_step_s * _steps(layers, gpus) > longest_s:
            break
        profile = chain(layers)
        ours, _ = _solved(profile, gpus)
        described = [
            ChainLayer(
                layer.forward_s + layer.backward_s,
                sum(value.output_bytes for value in layer.outputs),
                layer.gradient_bytes,
            )
            for layer in profile.layers
        ]
        started = time.process_time()
        theirs_s = best_time_s(described, gpus, BANDWIDTH_BYTES_PER_S)
        seconds = time.process_time() - started
        per_step_s = seconds / _steps(layers, gpus)
        same = abs(theirs_s - ours.seconds) <= 1e-9 * theirs_s
        texts.append(
            f"{layers} layers, {gpus} GPUs {seconds:.2f} s ({per_step_s * 1e9:.0f} ns a step"
            f"{', the same answer' if same else f', {theirs_s:.6f} s against our better plan'})"
        )
    return "; ".join(texts) + ".", per_step_s


def _steps(layers: int, gpus: int) -> float:
    """Return how many last stages the programme considers: L²/2 · G²/2."""
    return layers**2 / 2 * gpus**2 / 2


if __name__ == "__main__":
    main()
