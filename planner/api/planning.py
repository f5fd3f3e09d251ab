"""The verbs that need no PyTorch, as functions: `planner.solve`, `planner.price`, `planner.report` and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from planner.analysis.compare import compare, with_rows
from planner.analysis.explain import explain
from planner.analysis.own_plan import equal_stages, stages_ending_at
from planner.analysis.own_plan import price as priced
from planner.analysis.sweep import MOST_POINTS, bandwidth_sweep
from planner.analysis.usual_ways import with_baselines, with_synchronous
from planner.arguments import checked
from planner.errors import ClusterError, InputError, PlannerError
from planner.formats.cluster import Cluster, DeviceKind, flat_cluster, hierarchical_cluster, load_cluster
from planner.formats.device_kinds import cluster_for
from planner.formats.files import write_text
from planner.formats.importers import is_profile, read_one_profile, read_profile
from planner.formats.own_plan import OwnPlan, OwnStage, load_own_plan
from planner.formats.pipedream import graph_txt
from planner.formats.plan import Plan, load_plan
from planner.formats.profile import Profile
from planner.formats.timeline import Timeline
from planner.options.cluster import ClusterOptions, listed
from planner.options.numbers import is_count
from planner.options.option import keywords_of, refuse
from planner.options.solving import SolveOptions
from planner.options.verbs import PriceOptions, ReportOptions
from planner.reporting.page.page import report_page
from planner.reporting.svg import profile_svg, timeline_svg
from planner.reporting.tables.plan import plan_report
from planner.reporting.tables.profile import profile_report
from planner.reporting.timeline import opening
from planner.reporting.trace import load_run
from planner.schedule.registry import find
from planner.simulator.simulate_plan import simulate, simulate_recorded
from planner.simulator.summary import summarize
from planner.solver.find_plan import find_plan
from planner.solver.problem.budget import Patience

# Shares of the time left: of `solve` for the search, and then for the best synchronous plan; the rest is for what
# people use. Of a report for the comparison, and then for the explanation; the rest is for the bandwidths.
SEARCHING, BESIDE = 0.9, 0.7
COMPARING, EXPLAINING = 0.3, 0.4
SPREAD = 10.0  # a report's bandwidths: from the plan's divided by this to the plan's multiplied by it
PLAN, PROFILE = Path("plan.json"), Path("profile.json")  # what one verb writes, the next one reads
FORMATS = ("html", "svg")
# 4: as many stages, of equally many blocks; [6, 6, 7, 5]: the blocks of each; or the last layer of each but the last.
Stages: TypeAlias = int | str | Sequence[int] | Sequence[str]


class Text(str):
    """A text that an interactive session shows as it prints."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@keywords_of(ClusterOptions, arguments=1)
def cluster(profile: Profile, options: ClusterOptions) -> Cluster:
    """Return the cluster that the command line's arguments describe, with what the profile says of its GPUs.

    Args:
        profile: says how much memory a GPU has, and which kinds of GPUs there are.

    Raises:
        ClusterError, UnitError: when they do not describe one.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> planner.cluster(profile, topology="4x2", bandwidth="nvlink3,10Gbps", memory="16GB").gpus
        8
    """
    memory_bytes = options.memory
    # A CPU's memory is the whole machine's, which says little about one worker; each of several kinds has its own.
    if memory_bytes is None and profile.device.kind != "cpu" and not profile.kinds:
        memory_bytes = profile.device.memory_bytes
    if options.cluster is not None:
        refuse(options, "cluster", "gpus", "topology", "bandwidth", "own_links", "no_overlap")
        described = load_cluster(options.cluster)
        if options.memory is not None or described.memory_bytes is None:
            described = described.model_copy(update={"memory_bytes": memory_bytes})
    else:
        described = _linked(options, memory_bytes)
    changes: dict[str, object] = {}
    if options.kinds is not None:
        counts = dict(options.kinds)  # type: ignore[arg-type]  # a text was parsed
        if sum(counts.values()) != described.gpus:
            raise ClusterError(
                f"the kinds are {' + '.join(map(str, counts.values()))} GPUs, and the cluster has {described.gpus}",
                hint="give `kinds` as many GPUs as `gpus` or `topology`",
            )
        changes["kinds"] = tuple(DeviceKind(name=name, count=count) for name, count in counts.items())
    if options.compress is not None:
        changes["compress"] = options.compress
    if options.sequence_parallel:
        changes["sequence_parallel"] = True
    return cluster_for(profile, described.model_copy(update=changes))


def _linked(options: ClusterOptions, memory_bytes: int | str | None) -> Cluster:
    """Return the cluster of the links that the options describe."""
    rates, latencies = listed(options.bandwidth), listed(options.latency)
    overlap = not options.no_overlap
    if not rates:
        hint = "give `bandwidth=10Gbps`, or `cluster=cluster.json`"
        raise ClusterError("the cluster has no bandwidth", hint=hint)
    if options.topology is not None:
        refuse(options, "topology", "gpus")
        sizes = [int(size) for size in options.topology]
        latencies = latencies * len(sizes) if len(latencies) == 1 else latencies
        links = sizes, rates, memory_bytes, latencies
        return hierarchical_cluster(*links, shared=not options.own_links, overlap=overlap)
    if options.gpus is None:
        hint = "give `gpus=8`, `topology=4x2`, or `cluster=cluster.json`"
        raise ClusterError("the cluster has no number of GPUs", hint=hint)
    refuse(options, "gpus", "own_links")
    for values, what in ((rates, "`bandwidth`"), (latencies, "`latency`")):
        if len(values) != 1:
            raise ClusterError(f"{what} has {len(values)} values for one level", hint="name the levels with `topology`")
    return flat_cluster(options.gpus, rates[0], memory_bytes, latencies[0], overlap=overlap)


@keywords_of(SolveOptions)
def solve(profile: Profile, cluster: Cluster, options: SolveOptions) -> Plan:
    """Find the fastest plan for training the profiled model on the cluster.

    Args:
        profile: costs per layer, for one microbatch.
        cluster: devices, memory and links.

    Returns:
        A plan on as few GPUs as its speed needs. Under the resource model its time is that of its simulation, by which
        it was chosen among the best plans by the cost model. `solver.status` is `optimal` if the time is within
        2% of `lower_bound_s`, which by the cost model no plan over any legal cut can beat. Plans for trainable
        models cut along the profile's order. Imported profiles cannot be trained, so for them other orders of the
        branches count as well. When the time limit ends, simulations end at once, searches after their current step,
        which takes some seconds at most. The plan names what people do without a planner, and beside an asynchronous
        plan the best one whose gradients are never late.

    Raises:
        InfeasibleError: if no plan fits the memory, with the smallest change that makes one fit.
        InputError: for a cost model or number of microbatches that make no sense under the schedule.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(4, "1Gbps"))
        >>> plan.config, plan.solver.status
        ('2-1-1', 'optimal')
    """
    return solved(profile, cluster, options, Patience.of(options.time_limit_s, options.progress))


def solved(profile: Profile, cluster: Cluster, options: SolveOptions, patience: Patience) -> Plan:
    """Find the fastest plan, and what to read beside it, before the patience ends."""
    plan = find_plan(profile, cluster, options, patience.part(SEARCHING))
    if not options.alone:  # or the alternative would have to respect the same
        plan = with_synchronous(profile, plan, options, patience.part(BESIDE), asked=options.asked)
    return with_baselines(profile, plan, patience)


@keywords_of(PriceOptions, arguments=3)
def price(profile: Profile, cluster: Cluster, stages: OwnPlan | Path | Stages, options: PriceOptions) -> Plan:
    """Return the plan of stages that you chose yourself, priced and simulated.

    Stages take consecutive ranks, and have as many units in flight as the schedule's paper says. The plan may need more
    memory than the GPUs have: `plan.lacking_bytes` says so.

    Args:
        profile: costs per layer, for one microbatch.
        cluster: devices, memory and links.
        stages: 4: as many stages, of equally many blocks; [6, 6, 7, 5]: the blocks of each stage; or the last layer of
            each stage but the final one. An `OwnPlan`, or the path of its file, says all in place of the keywords.

    Raises:
        ClusterError, ProfileError: for kinds of GPUs, or groups of ranks, that the profile does not know.
        PlanError: for a schedule whose weight versions do not suffice for so many stages.
        InputError: for stages that are not the profile's layers in order, or that need more GPUs than there are.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> planner.price(profile, planner.flat_cluster(4, "1Gbps"), [20, 3], replicas=[3, 1]).config
        '3-1'
    """
    if isinstance(stages, Path):
        stages = load_own_plan(stages)
    if not isinstance(stages, OwnPlan):
        stages = _own_plan(profile, cluster, stages, options)
    return with_baselines(profile, priced(profile, cluster, stages), Patience())


def _own_plan(profile: Profile, cluster: Cluster, wanted: Stages, options: PriceOptions) -> OwnPlan:
    schedule, stages = find(options.schedule), _stages(wanted, profile)
    chunks = schedule.fixed_chunks or options.chunks
    replicas = _replicas(options.replicas, len(stages), cluster.gpus * chunks // len(stages))
    again = dict(_chosen("recompute", options.recompute, range(len(stages))))
    several = [stage for stage, (count, _) in enumerate(replicas) if count > 1]
    sharded = [stage for stage, _ in _chosen("shard_optimizer", options.shard_optimizer, several)]
    for number in (*again, *sharded):
        if number >= len(stages):
            raise InputError(f"there is no stage {number}", hint=f"stages count from 0 to {len(stages) - 1}")
    if alone := [number for number in sharded if number not in several]:
        raise InputError(
            f"stage {alone[0]} has one replica, which has nobody to divide the optimizer's state with",
            hint="give it 2 `replicas` or more",
        )
    described = tuple(
        stage.model_copy(
            update={
                "replicas": count,
                "tensor": degree,
                "recompute": again.get(number, False),
                "sharded": number in sharded,
            }
        )
        for number, (stage, (count, degree)) in enumerate(zip(stages, replicas, strict=True))
    )
    return OwnPlan(stages=described, schedule=schedule, microbatches=options.microbatches, chunks=options.chunks)


def _parts(given: Any) -> list[str]:
    """Return what is given, as one thing, as several or as a text with commas, as several texts."""
    if isinstance(given, Mapping):
        return [f"{stage}:{units}" for stage, units in given.items()]
    return str(given).split(",") if isinstance(given, int | str) else [str(part) for part in given]


def _stages(wanted: Stages, profile: Profile) -> list[OwnStage]:
    parts = _parts(wanted)
    if not all(is_count(part) for part in parts):
        return stages_ending_at(profile, parts)
    if len(parts) == 1:
        return equal_stages(profile, int(parts[0]))
    if "0" in parts:
        raise InputError(
            f"`stages={','.join(parts)}` has a stage without blocks", hint="give each stage at least one block"
        )
    return [OwnStage(blocks=int(part)) for part in parts]


def _replicas(given: Any, stages: int, possible: int) -> list[tuple[int, int]]:
    """Return the replicas of each stage, and the ranks of each of them."""
    if given is None:
        return [(max(1, possible), 1)] * stages
    parts = [part.partition("x") for part in _parts(given)]
    pairs = [(count, degree if times else "1") for count, times, degree in parts]
    if not all(is_count(number) and int(number) for pair in pairs for number in pair) or len(pairs) not in (1, stages):
        raise InputError(
            f"`replicas={','.join(_parts(given))}` does not say how many replicas each of {stages} stages has",
            hint=f"give one number for all, or {stages} numbers, each 1 or more: `replicas=2,1,1`",
        )
    return [(int(count), int(degree)) for count, degree in pairs] * (stages if len(pairs) == 1 else 1)


def _chosen(name: str, given: Any, all_stages: Sequence[int]) -> Iterator[tuple[int, bool | int]]:
    """Yield the stages that "all" or "0,1:4" names, each with what follows its colon, or True."""
    parts = ["all"] if given is True else [] if given is False else _parts(given)
    for part in parts:
        which, colon, units = part.partition(":")
        has_units = name == "recompute" and is_count(units) and int(units) > 0
        if not (which == "all" or is_count(which)) or (colon and not has_units):
            text = f"`{name}={','.join(parts)}` is no list of stages"
            raise InputError(text, hint=f"for example: `{name}=0,1`, or all")
        for stage in all_stages if which == "all" else [int(which)]:
            yield stage, int(units) if colon else True


@checked
def show(
    file: Plan | Profile | str | Path = PLAN, *, by: Any = "order", top: int | None = None, format: str = "table"
) -> str:
    """Write a plan or a profile, or what their files hold, as tables.

    Args:
        file: a plan, a profile, or the path of one; also a graph.txt that PipeDream published.
        by: sorts a profile's layers: "order" of execution, or "time", "output", "weights", "saved", the largest first.
        top: shows only the first layers of a profile.
        format: "table", "json", or of a profile "svg" and "graph.txt".

    Raises:
        PlanError, ProfileError: for files that are neither.
        InputError: for a format of profiles, and a plan.

    Example:
        >>> print(planner.show("profiles/vgg16/cpu.json", by="time", top=1).splitlines()[0])
        model      vgg16
    """
    what = file if isinstance(file, Plan | Profile) else (read_profile if is_profile(Path(file)) else load_plan)(file)
    if isinstance(what, Plan) and format not in ("table", "json"):
        raise InputError(f"`format={format}` is for profiles, and '{file}' is a plan", hint="name a profile")
    match format:
        case "table":
            return Text(plan_report(what) if isinstance(what, Plan) else profile_report(what, by=by, top=top))
        case "svg" if isinstance(what, Profile):
            return profile_svg(what)
        case "graph.txt" if isinstance(what, Profile):
            return graph_txt(what).rstrip("\n")
        case _:
            return what.model_dump_json(indent=1)


@keywords_of(ReportOptions)
def report(plan: Plan | str | Path, output: str | Path | None, options: ReportOptions) -> Path:
    """Write all about a plan to one HTML file that needs no network, and return its path.

    Args:
        plan: from `solve`, or the path of its file.
        output: file to write, as report.html; FILE.svg for the timeline alone.

    Raises:
        PlanError, ProfileError: for a plan, a profile or a run that do not belong together.
        InputError: for another format.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(4, "1Gbps"))
        >>> planner.report(plan, "report.html", profile=profile).name
        'report.html'
    """
    return reported(plan, output, options, Patience.of(options.time_limit_s))  # type: ignore[arg-type]  # parsed


def reported(
    plan: Plan | str | Path,
    output: str | Path | None,
    options: ReportOptions,
    patience: Patience,
    words: Callable[[str], str] = str,
) -> Path:
    """Gather what a report shows before the patience ends, and write it; `words` rewrites messages on the page."""
    style, path = _style(options.format, None if output is None else Path(output))
    if options.points != 0 and not 2 <= options.points <= MOST_POINTS:
        raise InputError(f"{options.points} points make no sweep", hint=f"give `points` from 2 to {MOST_POINTS}, or 0")
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    simulated, measured = timelines(plan, options, "measured")
    if style == "svg":
        runs = [simulated] if measured is None else [simulated, measured]
        shown = opening(summarize(simulated), simulated, max(run.span_s for run in runs))
        written = timeline_svg(runs, shown)
    else:
        alternatives = _alternatives(plan, options, patience)
        if comparison := alternatives.get("comparison"):
            plan = with_rows(plan, comparison)
        if why_not := alternatives.get("why_not"):
            alternatives["why_not"] = words(why_not)
        written = report_page(plan, simulated, measured, **alternatives)
    write_text(path, written)
    return path


def timelines(plan: Plan, options: Any, run: str) -> tuple[Timeline, Timeline | None]:
    """Return the simulation, and the run that an argument names if it does: then of the run's minibatches."""
    if getattr(options, run) is None:
        return simulate(plan, options.minibatches, options.accumulate or 1), None
    refuse(options, run, "minibatches", "accumulate", why=", which knows it")
    given = getattr(options, run)
    measured = given if isinstance(given, Timeline) else load_run(given)
    return simulate_recorded(plan, measured), measured


def _style(format: str | None, output: Path | None) -> tuple[str, Path]:
    """Return the format and the file; raise InputError when the file's name ends in another format."""
    suffix = "" if output is None else output.suffix.lower().removeprefix(".")
    if format is None and suffix not in ("", "htm", *FORMATS):
        raise InputError(
            f"'{output}' is not a format of reports, which are {', '.join(FORMATS)}",
            hint="print report.html from a browser, or convert a picture",
        )
    style = format or (suffix if suffix in FORMATS else "html")
    return style, output or Path(f"report.{style}")


def _alternatives(plan: Plan, options: ReportOptions, patience: Patience) -> dict[str, Any]:
    """Return what of the report takes the profile: comparison, explanation and sweep; or why they are missing.

    Raises:
        PlannerError: when the user named a profile, and it is not the plan's.
    """
    missing = "The comparison, what would help, and other bandwidths"
    if options.profile is None and not PROFILE.exists():
        return {"why_not": f"{missing}: there is no {PROFILE}; name a profile with `profile`."}
    try:
        given = options.profile or PROFILE
        profile = given if isinstance(given, Profile) else read_one_profile(str(given))
        comparison = compare(profile, plan=plan, patience=patience.part(COMPARING))
    except PlannerError as error:
        if options.profile is not None:
            raise
        return {"why_not": f"{missing}: {error.message}."}
    explanation = explain(profile, plan, patience=patience.part(EXPLAINING))
    sweep = bandwidth_sweep(profile, plan, options.points, SPREAD, patience) if options.points else None
    source = profile.provenance.source
    return {"comparison": comparison, "explanation": explanation, "sweep": sweep, "source": source}
