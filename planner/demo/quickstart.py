"""Run the whole product on one machine: profile, solve, train, and train with data parallelism for
comparison.
"""

from importlib import resources
from pathlib import Path

from planner.formats.files import Record, replace, write_text
from planner.formats.late import LateFailure, noting
from planner.formats.plan import Plan, save_plan
from planner.formats.profile import save_profile
from planner.formats.shown import Shown
from planner.options.option import keywords_of
from planner.options.verbs import QuickstartOptions
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
    late_failures: tuple[LateFailure, ...] = ()  # which of the folder's files could not be written

    def __str__(self) -> str:
        rows = []
        misses = ""
        for name, run, predicted in (
            ("plan", self.pipeline, self.pipeline.predicted_samples_per_s),
            ("DDP", self.data_parallel, self.predicted_data_parallel_samples_per_s),
        ):
            first, last, _ = loss_ends(run.losses)
            known = predicted is not None and run.samples_per_s > 0
            if predicted is not None and known:
                misses += miss_words(name, predicted / run.samples_per_s - 1)
            rows.append(
                {
                    "": name,
                    "config": run.config,
                    "predicted": f"{predicted:.1f} samples/s" if known else "-",
                    "measured": f"{run.samples_per_s:.1f} samples/s",
                    "error": percent_error(predicted, run.samples_per_s)
                    if predicted is not None
                    else "-",
                    "loss": f"{first:.3f} -> {last:.3f}",
                }
            )

        link = format_bandwidth(self.link_bytes_per_s)
        ours = self.pipeline.samples_per_s
        theirs = self.data_parallel.samples_per_s
        times = "too few minibatches to say how many times as fast"
        if ours and theirs:
            times = as_fast(ours / theirs)
        faster = (
            f"The plan trains {times} as DistributedDataParallel here, over a link of "
            f"{link}.{misses}"
        )
        return f"{table_of(rows).text()}\n\n{faster}"


@keywords_of(QuickstartOptions)
def quickstart(folder: str | Path, options: QuickstartOptions) -> QuickstartResult:
    """Profile VGG-16 here, find its best plan, train it, train it with data parallelism, and
    compare.

    Args:
        folder: gets model.py, profile.json and plan.json.

    Raises:
        PlannerError: when the device or the backend is not there, or a run fails.
    """
    from planner.executor.worker import launch
    from planner.model.spec import load_model_file
    from planner.profiler.links.this_host import cluster_here, neighbours_of, places_here
    from planner.profiler.measured.profiling import ProfilingOptions, profile_model
    from planner.solver import search_plan
    from planner.workers.place import check_backend, kind_here

    folder = Path(folder)
    kind = options.device or kind_here()
    backend = options.backend
    check_backend(kind, backend)
    workers = options.gpus or min(MOST_WORKERS, places_here(kind))
    model = folder / "model.py"
    write_text(
        model, resources.files("planner.demo").joinpath("vgg16.py").read_text(encoding="utf-8")
    )

    processes = neighbours_of(workers, kind)
    beside = ""
    if processes != 1:
        beside = f", with {processes - 1} more that compute at the same time"
    unit = "core" if kind == "cpu" else "GPU"
    options.on_phase(f"Profiling VGG-16 at batch {BATCH_SIZE} on one {unit}{beside} ...")
    profiling = ProfilingOptions(device=kind, seconds=PROFILE_SECONDS, processes=processes)
    profile = profile_model(load_model_file(str(model)), BATCH_SIZE, profiling)
    late: list[LateFailure] = []
    with noting(late):
        save_profile(profile, folder / "profile.json")

    options.on_phase("Measuring the link between the workers ...")
    cluster = cluster_here(profile, workers, kind, backend)
    plan = search_plan(profile, cluster)
    with noting(late):
        save_plan(plan, folder / "plan.json")
    options.on_phase(f"Training {options.steps} minibatches with the plan '{plan.config}' ...")
    job = Job(model=str(model), plan=plan, steps=options.steps, device=kind, backend=backend)
    job = replace(job, show_progress=options.show_progress)
    pipeline = launch(job)
    options.on_phase(
        f"Training {options.steps} minibatches with DistributedDataParallel on {plan.workers} "
        f"workers ..."
    )
    predicted = plan.predicted.samples_per_s
    return QuickstartResult(
        folder=str(folder),
        link_bytes_per_s=cluster.levels[0].bandwidth_bytes_per_s,
        plan=plan,
        pipeline=pipeline,
        data_parallel=launch(replace(job, baseline="data-parallel")),
        predicted_data_parallel_samples_per_s=(
            None if predicted is None else predicted / plan.predicted.speedup_over_data_parallel
        ),
        late_failures=tuple(late),
    )


def miss_words(name: str, error: float) -> str:
    """Return a sentence about a prediction that is off by this share; none where it is little."""
    if abs(error) < WORTH_SAYING:
        return ""
    why = "runs this short vary by some percent; give `steps=1000` to see what is left"
    return (
        f"\nThe prediction for {name} is {abs(error):.0%} too "
        f"{'high' if error > 0 else 'low'}: {why}."
    )
