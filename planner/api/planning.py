"""The verbs that need no PyTorch, as functions: `planner.solve`, `planner.price`, `planner.report`
and others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.analysis.compare import compare
from planner.analysis.explain import explain
from planner.analysis.given_plan import price as priced
from planner.analysis.slow_links import leaving_time, with_slow_links
from planner.api.as_trained import as_trained
from planner.api.own_stages import Stages, own_plan
from planner.api.servers import check_rates, number_of_gpus, number_of_servers, offload_of
from planner.arguments import checked
from planner.errors import ClusterError, InputError, PlannerError
from planner.formats.cluster import (
    Cluster,
    DeviceKind,
    flat_cluster,
    hierarchical_cluster,
    load_cluster,
)
from planner.formats.device_kinds import cluster_for, is_profile, planned_bytes, read_profile
from planner.formats.files import replace, write_text
from planner.formats.own_plan import OwnPlan
from planner.formats.plan import Plan, load_plan
from planner.formats.profile import Profile, load_profile
from planner.formats.timeline import Timeline
from planner.options.cluster import ClusterOptions, listed
from planner.options.option import keywords_of, refuse
from planner.options.solving import SolveOptions
from planner.options.verbs import REPORT_S, PriceOptions, ReportOptions, ScheduleOptions
from planner.plan.trainable import check_priced
from planner.profiler.estimated.devices import DEVICES, find_device
from planner.reporting.page.page import report_page
from planner.reporting.tables.plan import plan_report
from planner.reporting.tables.profile import profile_report
from planner.reporting.trace import load_run
from planner.simulator.simulate_plan import simulate, simulate_recorded
from planner.solver.alternatives.table import with_baselines
from planner.solver.clock import Clock
from planner.solver.each_schedule import ScheduleComparison, compare_each
from planner.solver.request import Request, options_of
from planner.solver.solve import solve as solve_request
from planner.units import parse_bytes

# Shares of the time of a report, for the comparison, and then for the explanation.
COMPARING = 0.3
EXPLAINING = 0.4
PLAN, PROFILE = Path("plan.json"), Path("profile.json")  # what one verb writes, the next one reads

# Options that a file of the cluster takes the place of.
DESCRIBED_TWICE = (
    "gpus",
    "servers",
    "gpus_per_server",
    "topology",
    "bandwidth",
    "latency",
    "own_links",
    "no_overlap",
)


_UNSAID = ClusterOptions()  # callers give keywords in its place


@keywords_of(ClusterOptions)
def cluster(profile: Profile | None = None, options: ClusterOptions = _UNSAID) -> Cluster:
    """Return the cluster that the command line's arguments describe, with what the profile says of
    its GPUs.

    Args:
        profile: says how much memory a GPU has, and which kinds of GPUs there are; None where
            nothing is known of that.

    Raises:
        ClusterError, UnitError: when they do not describe one.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> links = "pcie4,10Gbps"
        >>> planner.cluster(profile, servers=2, gpus_per_server=4, bandwidth=links).gpus
        8
    """
    described = _described(options, profile)
    if options.compress is not None:
        described = replace(described, compress=options.compress)
    if options.kinds is not None:
        described = replace(described, kinds=_kinds(options, described.gpus))
    if options.sequence_parallel:
        _check_divides(profile)
        described = replace(described, sequence_parallel=True)

    offload = offload_of(options, _kind_of(profile), _per_server(options, described))
    if offload is not None:
        described = replace(described, offload=offload)
    if profile is None:
        return described
    return cluster_for(profile, described)


def _described(options: ClusterOptions, profile: Profile | None) -> Cluster:
    """Return the cluster of the options' file, or of those that count GPUs and name links."""
    memory = options.memory
    # Each of several kinds has its own.
    if memory is None and profile is not None and not profile.kinds:
        memory = planned_bytes(profile.device)
    if options.cluster is None:
        return _linked(options, memory)

    refuse(options, "cluster", *DESCRIBED_TWICE)
    read = load_cluster(options.cluster)
    if options.memory is None and read.memory_bytes is not None:
        return read
    limit = parse_bytes(memory) if isinstance(memory, str) else memory
    return replace(read, memory_bytes=limit)


def _kinds(options: ClusterOptions, gpus: int) -> tuple[DeviceKind, ...]:
    counts = dict(options.kinds)  # type: ignore[arg-type]  # a text was parsed
    if sum(counts.values()) != gpus:
        raise ClusterError(
            f"the kinds are {' + '.join(map(str, counts.values()))} GPUs, and the cluster has "
            f"{gpus}",
            hint="give `kinds` as many GPUs as the cluster has",
        )
    return tuple(DeviceKind(name=name, count=count) for name, count in counts.items())


def _kind_of(profile: Profile | None) -> str:
    """Return the name of the profiled kind of GPU; "" for one that no table has."""
    if profile is None:
        return ""
    found = find_device(profile.device.name)
    return next((name for name, spec in DEVICES.items() if spec is found), "")


def _per_server(options: ClusterOptions, cluster: Cluster) -> int:
    """Return the GPUs that share a host: those of a server, or all where no servers were named."""
    if options.servers is not None:
        return cluster.gpus // options.servers
    return cluster.levels[0].size


def _check_divides(profile: Profile | None) -> None:
    """Raise InputError for a profile that knows no groups of ranks, whose tokens they would
    divide.
    """
    if profile is None or profile.tensor:
        return
    raise InputError(
        f"`sequence_parallel` is for groups of ranks, of which the profile of '{profile.model}' "
        f"says nothing",
        hint="profile with `tensor=2`, or leave it out",
    )


# of a link that anybody trains over: less is a number whose unit was left out
_SLOWEST_BYTES_PER_S = 10_000


def _linked(options: ClusterOptions, memory_bytes: int | str | None) -> Cluster:
    """Return the cluster of the options that count GPUs and name links."""
    rates = listed(options.bandwidth)
    if not rates:
        raise ClusterError(
            "the cluster has no bandwidth",
            hint="give `bandwidth=pcie4,10Gbps` with two `servers`, or `cluster=cluster.json`",
        )

    for rate in rates:
        if not isinstance(rate, str) and rate < _SLOWEST_BYTES_PER_S:
            raise ClusterError(
                f"`bandwidth={rate}` is {rate:g} bytes per second",
                hint="give a text with its unit, such as `bandwidth=10Gbps`",
            )

    if options.topology is not None:
        refuse(options, "topology", "gpus", "servers", "gpus_per_server")
        sizes = [int(size) for size in options.topology]
    else:
        sizes = _levels_of_servers(options, rates)

    latencies = listed(options.latency)
    overlap = not options.no_overlap
    if len(sizes) > 1 or options.topology is not None:
        if len(latencies) == 1:
            latencies = latencies * len(sizes)
        shared = not options.own_links
        return hierarchical_cluster(
            sizes, rates, memory_bytes, latencies, shared=shared, overlap=overlap
        )

    if options.own_links:
        raise ClusterError(
            "`own_links` is for several servers of several GPUs: these GPUs have links of their "
            "own",
            hint="leave out `own_links`, or give `servers=2`",
        )

    for values, what in ((rates, "`bandwidth`"), (latencies, "`latency`")):
        if len(values) != 1:
            raise ClusterError(
                f"{what} has {len(values)} values for one level",
                hint="say how many servers there are: `servers=2`",
            )

    return flat_cluster(sizes[0], rates[0], memory_bytes, latencies[0], overlap=overlap)


def _levels_of_servers(options: ClusterOptions, rates: Sequence[float | str]) -> list[int]:
    """Return the GPUs per server and the servers, or the GPUs alone where all have one link."""
    gpus = number_of_gpus(options.gpus, options.servers, options.gpus_per_server)
    if gpus is None:
        raise ClusterError(
            "the cluster has no number of GPUs",
            hint="give `servers=2` and `gpus_per_server=4`, `gpus=8`, or `cluster=cluster.json`",
        )

    servers = number_of_servers(gpus, options.servers, options.gpus_per_server)
    if servers is None:
        return [gpus]

    check_rates(rates, gpus, servers)
    if 1 < servers < gpus:
        return [gpus // servers, servers]
    return [gpus]


@keywords_of(SolveOptions)
def solve(profile: Profile, cluster: Cluster, options: SolveOptions) -> Plan:
    """Find the fastest plan for training the profiled model on the cluster.

    Args:
        profile: costs per layer, for one microbatch.
        cluster: devices, memory and links.

    Returns:
        A plan on as few GPUs as its speed needs. Its time is that of its simulation, by which it
        was chosen among the best plans by the cost model. `solver.status` is `optimal` if the time
        is within 1% of `lower_bound_s`, which by the cost model no pipeline can beat;
        `solver.bound_of` says of which pipelines, where not of all. `solver.cuts` says which cuts
        of a model with branches were searched. The plan names what people do without a planner, and
        beside an asynchronous plan the best synchronous one. Of other ways with as many samples per
        update that the options allow, none is faster.

    Raises:
        InfeasibleError: if no plan fits the memory, with the smallest change that makes one fit.
        InputError: for a number of microbatches that makes no sense under the schedule.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(4, "1Gbps"))
        >>> plan.config, plan.solver.status
        ('2-1-1', 'optimal')
    """
    return answer(Request.of(profile, cluster, options))


def answer(request: Request) -> Plan:
    """Solve before the request's clock ends, and say what slower links would change."""
    plan = solve_request(leaving_time(request))
    return as_trained(with_slow_links(plan, request))


@keywords_of(PriceOptions)
def price(
    profile: Profile, cluster: Cluster, stages: OwnPlan | Stages, options: PriceOptions
) -> Plan:
    """Return the plan of stages that you chose yourself, priced and simulated.

    Stages take consecutive ranks, and have as many units in flight as the schedule's paper says.
    The plan may need more memory than the GPUs have: `plan.lacking_bytes` says so.

    Args:
        profile: costs per layer, for one microbatch.
        cluster: devices, memory and links.
        stages: 4: as many stages, of equally many blocks; [6, 6, 7, 5]: the blocks of each stage;
            or the last layer of each stage but the final one. An `OwnPlan` says all in place of the
            keywords.

    Raises:
        ClusterError, ProfileError: for kinds of GPUs, or groups of ranks, that the profile does not
        know. PlanError: for a schedule whose weight versions do not suffice for so many stages.
        InputError: for stages that are not the profile's layers in order, or that need more GPUs
        than there are; and
            for what `train` would refuse, where the profile is of a model.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> cluster = planner.flat_cluster(4, "1Gbps")
        >>> planner.price(profile, cluster, [20, 3], replicas=[3, 1]).config
        '3-1'
    """
    if not isinstance(stages, OwnPlan):
        stages = own_plan(profile, cluster, stages, options)
    accepts = options.accept_divided_loss
    plan = priced(profile, cluster, stages, accepts_loss=accepts)
    check_priced(plan, profile, accepted=accepts)
    request = Request(profile, plan.cluster, options_of(plan), Clock())
    return as_trained(with_baselines(plan, request))


@keywords_of(ScheduleOptions)
def compare_schedules(
    profile: Profile | Sequence[Profile], cluster: Cluster, options: ScheduleOptions
) -> ScheduleComparison:
    """Find the best plan under each of several schedules, with each number of microbatches.

    Args:
        profile: costs per layer, for one microbatch; or several of one model, for microbatches of
            other sizes.
        cluster: devices, memory and links.

    Returns:
        A row for each, those with the same global batch together. `to_csv()` and `to_frame()` give
        them to other programs. A schedule that has no plan says why.

    Raises:
        InputError: for an unknown schedule, or a number of microbatches that makes no sense.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> cluster = planner.flat_cluster(2, "1Gbps")
        >>> names = ["gpipe", "1f1b-flush"]
        >>> rows = planner.compare_schedules(profile, cluster, schedules=names).rows
        >>> [str(row.schedule) for row in rows]
        ['gpipe', '1f1b-flush']
    """
    if isinstance(profile, Profile):
        profiles = [profile]
    else:
        profiles = list(profile)
    if len({each.model for each in profiles}) != 1:
        raise InputError("`profile` names no model, or several", hint="give profiles of one model")
    clock = Clock.of(options.time_limit_s, options.progress)
    return compare_each(profiles, cluster, options, clock)


@checked
def show(
    file: Plan | Profile | str | Path = PLAN, *, by: Any = "order", top: int | None = None
) -> str:
    """Write a plan or a profile, or what their files hold, as tables.

    Args:
        file: a plan, a profile, or the path of one.
        by: sorts a profile's layers: "order" of execution, or "time", "output", "weights", "saved",
            the largest first.
        top: shows only the first layers of a profile.

    Raises:
        PlanError, ProfileError: for files that are neither.

    Example:
        >>> print(planner.show("profiles/vgg16/cpu.json", by="time", top=1).splitlines()[0])
        model      vgg16
    """
    what = file if isinstance(file, Plan | Profile) else plan_or_profile(file)
    if isinstance(what, Plan):
        return plan_report(what)
    return profile_report(what, by=by, top=top)


def plan_or_profile(path: str | Path) -> Plan | Profile:
    """Read a file, which holds one or the other."""
    # of a file that is not there the name says which it would be, and so what makes it
    missing_profile = not Path(path).exists() and "profile" in Path(path).name
    if is_profile(Path(path)) or missing_profile:
        return load_profile(path)
    return load_plan(path)


@keywords_of(ReportOptions)
def report(plan: Plan | str | Path, output: str | Path | None, options: ReportOptions) -> Path:
    """Write all about a plan to one HTML file that needs no network, and return its path.

    Args:
        plan: from `solve`, or the path of its file.
        output: file to write; report.html for None.

    Raises:
        PlanError, ProfileError: for a plan, a profile or a run that do not belong together.
        InputError: for another format.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(4, "1Gbps"))
        >>> planner.report(plan, "report.html", profile=profile).name
        'report.html'
    """
    path = Path("report.html" if output is None else output)
    if path.suffix.lower() not in ("", ".html", ".htm"):
        raise InputError(
            f"'{path}' is no name of a report, which is HTML",
            hint="print report.html from a browser",
        )

    clock = Clock.of(options.time_limit_s, options.progress)
    run = options.run
    if isinstance(run, str | Path):
        run = load_run(run)
    plan = _plan_of_run(plan if isinstance(plan, Plan) else load_plan(plan), run)

    # The default limit is for the searches: a simulation has one of its own, by its amount.
    limit_s = None
    if options.time_limit_s != REPORT_S:
        limit_s = clock.left_s
    simulated, measured = timelines(plan, options, run, "measured", limit_s)
    alternatives = _alternatives(plan, options, clock)
    write_text(path, report_page(plan, simulated, measured, **alternatives))
    return path


def _plan_of_run(plan: Plan, run: Timeline | None) -> Plan:
    """Return the plan under which a run ended: a smaller one where it lost hosts."""
    if run is None or run.config == plan.config:
        return plan
    return next((smaller for smaller in plan.smaller if smaller.config == run.config), plan)


def timelines(
    plan: Plan,
    options: ReportOptions,
    run: Timeline | str | Path | None,
    argument: str,
    time_limit_s: float | None = None,
) -> tuple[Timeline, Timeline | None]:
    """Return the simulation, and the run that an argument names if it does: then of the run's
    minibatches.
    """
    if run is None:
        return simulate(plan, options.minibatches, time_limit_s=time_limit_s), None
    refuse(options, argument, "minibatches", why=", which knows it")
    measured = run if isinstance(run, Timeline) else load_run(run)
    return simulate_recorded(plan, measured, time_limit_s=time_limit_s), measured


def _alternatives(plan: Plan, options: ReportOptions, clock: Clock) -> dict[str, Any]:
    """Return what of the report takes the profile, or why it is missing; one that the user named
    must be the plan's.
    """
    missing = "The comparison, and what would help"
    if options.profile is None and not PROFILE.exists():
        return {"why_not": f"{missing}: there is no {PROFILE}; name the plan's profile."}

    given = options.profile or PROFILE
    try:
        profile = given if isinstance(given, Profile) else read_profile(str(given))
        comparison = compare(profile, plan, clock=clock.part(COMPARING))
    except PlannerError as error:
        if options.profile is not None:
            raise
        return {"why_not": f"{missing}: {error.message}."}

    parts: dict[str, Any] = {"comparison": comparison, "source": profile.provenance.source}
    try:
        parts["explanation"] = explain(profile, plan, clock=clock.part(EXPLAINING))
    # such as a time limit in which no plan of another cluster was found
    except PlannerError as error:
        parts["why_not"] = f"What would help: {error.message}."

    return parts
