"""Run the whole product on one machine: profile, solve, train, and train with data parallelism for comparison."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from planner.formats.cluster import flat_cluster
from planner.formats.files import Record, write_text
from planner.formats.names import Backend, DeviceType
from planner.formats.plan import Plan, save_plan
from planner.formats.profile import save_profile
from planner.formats.shown import Shown
from planner.reporting.tables.runs import loss_ends, percent_error
from planner.reporting.tables.table import table_of
from planner.units import as_fast, format_bandwidth
from planner.workers.job import Job, TrainResult

WORTH_SAYING = 0.05  # error of a prediction
MOST_WORKERS = 8  # enough for a tour; more would only take longer
BATCH_SIZE = 16
PROFILE_SECONDS = 15.0


class QuickstartResult(Shown, Record):
    """The folder of all files, the plan, and the results of the two runs."""

    folder: str
    link_bytes_per_s: float
    plan: Plan
    pipeline: TrainResult
    data_parallel: TrainResult
    predicted_data_parallel_samples_per_s: float | None

    def __str__(self) -> str:
        return quickstart_report(self)


def quickstart(
    folder: Path,
    steps: int,
    workers: int | None,
    device: DeviceType | None,
    backend: Backend | None,
    *,
    show_progress: bool,
    on_phase: Callable[[str], None],
) -> QuickstartResult:
    """Run the tour; raise PlannerError when the device or the backend is not there, or a run fails.

    Args:
        folder: gets model.py, profile.json and plan.json.
        steps: minibatches of each of the two runs.
        workers: worker processes; None for as many as there are GPUs, or cores, up to `MOST_WORKERS`.
        device: for profile and runs alike; None for GPUs where there are any.
        backend: of messages; None for NCCL with GPUs.
    """
    from planner.executor.worker import launch
    from planner.model.spec import load_model_file
    from planner.profiler.links.measure_cluster import measure_host
    from planner.profiler.measured.profiling import ProfilingOptions, profile_model
    from planner.solver import solve
    from planner.workers.place import available_cores, check_backend, gpus_here, kind_here

    kind = device or kind_here()
    check_backend(kind, backend)
    there = max(1, gpus_here()) if kind != "cpu" else available_cores()
    workers = workers or min(MOST_WORKERS, there)
    model = folder / "model.py"
    write_text(model, resources.files("planner.demo").joinpath("vgg16.py").read_text(encoding="utf-8"))
    # As many as will share caches and memory in training; a GPU has its own.
    processes = min(workers, there) if kind == "cpu" else 1
    beside = "" if processes == 1 else f", with {processes - 1} more at work beside it"
    unit = "core" if kind == "cpu" else "GPU"
    on_phase(f"Profiling VGG-16 at batch {BATCH_SIZE} on one {unit}{beside} ...")
    options = ProfilingOptions(device=kind, seconds=PROFILE_SECONDS, processes=processes)
    profile = profile_model(load_model_file(str(model)), BATCH_SIZE, options)
    save_profile(profile, folder / "profile.json")
    on_phase("Measuring the link between the workers ...")
    sharing = -(-workers // there) if kind != "cpu" else workers  # of the memory that the profile tells of
    memory_bytes = None if profile.device.memory_bytes is None else profile.device.memory_bytes // sharing
    if workers > 1:
        cluster = measure_host(workers, kind, backend).model_copy(update={"memory_bytes": memory_bytes})
    else:
        cluster = flat_cluster(1, measure_host(2, "cpu").levels[0].bandwidth_bytes_per_s, memory_bytes)
    plan = solve(profile, cluster)
    save_plan(plan, folder / "plan.json")
    on_phase(f"Training {steps} minibatches with the plan '{plan.config}' ...")
    job = Job(model=str(model), plan=plan, steps=steps, show_progress=show_progress, device=kind, backend=backend)
    pipeline = launch(job)
    on_phase(f"Training {steps} minibatches with DistributedDataParallel on {plan.workers} workers ...")
    predicted = plan.predicted.samples_per_s
    return QuickstartResult(
        folder=str(folder),
        link_bytes_per_s=cluster.levels[0].bandwidth_bytes_per_s,
        plan=plan,
        pipeline=pipeline,
        data_parallel=launch(job.model_copy(update={"baseline": "data-parallel"})),
        predicted_data_parallel_samples_per_s=(
            None if predicted is None else predicted / plan.predicted.speedup_over_data_parallel
        ),
    )


def quickstart_report(result: QuickstartResult) -> str:
    """Return the plan's run beside data parallelism's, and what to do next."""
    rows, misses = [], ""
    for name, run, predicted in (
        ("plan", result.pipeline, result.pipeline.predicted_samples_per_s),
        ("DDP", result.data_parallel, result.predicted_data_parallel_samples_per_s),
    ):
        first, last, _ = loss_ends(run.losses)
        known = predicted is not None and run.samples_per_s > 0
        if predicted is not None and known:
            misses += miss_words(name, predicted / run.samples_per_s - 1, run.likely_cause)
        rows.append(
            {
                "": name,
                "config": run.config,
                "predicted": f"{predicted:.1f} samples/s" if known else "-",
                "measured": f"{run.samples_per_s:.1f} samples/s",
                "error": percent_error(predicted, run.samples_per_s) if predicted is not None else "-",
                "loss": f"{first:.3f} -> {last:.3f}",
            }
        )
    link = format_bandwidth(result.link_bytes_per_s)
    ours, theirs = result.pipeline.samples_per_s, result.data_parallel.samples_per_s
    times = as_fast(ours / theirs) if ours and theirs else "too few minibatches to say how many times as fast"
    faster = f"The plan trains {times} as DistributedDataParallel here, over a link of {link}.{misses}"
    return f"{table_of(rows).text()}\n\n{faster}"


def miss_words(name: str, error: float, likely_cause: str | None) -> str:
    """Say that a prediction is off by more than runs of this length usually vary, and why; "" where it is not."""
    if abs(error) < WORTH_SAYING:
        return ""
    why = likely_cause or "runs this short vary by some percent; give `steps=1000` to see what is left"
    return f"\nThe prediction for {name} is {abs(error):.0%} too {'high' if error > 0 else 'low'}: {why}."
