"""Plans in hand: beside a plan, those for the numbers of GPUs that are left when hosts are lost."""

from collections.abc import Iterator
from dataclasses import replace

from planner.errors import ClusterError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.solver.find_plan import find_plan
from planner.solver.problem.budget import Patience


def fewer_hosts(cluster: Cluster, most: int) -> Iterator[Cluster]:
    """Yield the cluster without one host, without two, up to `most`; GPUs that are all joined alike are a host each.

    Raise ClusterError where that depends on which host is lost, or where none would be left.
    """
    joined = cluster.joined
    if cluster.kinds or len(joined) > 2:
        what = "of several kinds" if cluster.kinds else f"on {len(joined)} levels"
        hint = "solve for what is left without `survive`, for each host that may be lost"
        raise ClusterError(f"which GPUs {what} are left depends on which host is lost", hint=hint)
    hosts = joined[-1].size
    if most >= hosts:
        raise ClusterError(f"of {hosts} hosts not {most} can be lost", hint=f"give `survive={hosts - 1}` or fewer")
    for left in range(hosts - 1, hosts - most - 1, -1):
        outer = joined[-1].model_copy(update={"size": left})
        yield cluster.model_copy(update={"levels": (*joined[:-1], outer)})


def with_fewer_hosts(profile: Profile, plan: Plan, options: SolveOptions, patience: Patience) -> Plan:
    """Return the plan with the fastest plans for up to `options.survive` hosts fewer, or a note why there is none.

    They train the same minibatches under the same schedule, so that a run can go on with any of them.
    """
    wanted, smaller = list(fewer_hosts(plan.cluster, options.survive)), list[Plan]()
    options = replace(options, schedule=plan.schedule, microbatches=plan.microbatches, minibatch=None, survive=0)
    for number, cluster in enumerate(wanted):
        try:
            found = find_plan(profile, cluster, options, patience.part(1 / (len(wanted) - number)))
        except PlannerError as error:  # no plan fits, or none takes so many microbatches
            # Still fewer GPUs have less memory in all.
            plan = plan.noting(f"The loss of {number + 1} hosts cannot be survived: {error.message}.")
            break
        smaller.append(found)
    return plan.model_copy(update={"smaller": tuple(smaller)})


def shares_left(plan: Plan) -> str | None:
    """Say what each loss costs: "7 of 8 GPUs: 88% of the speed, 6: 71%"; None for a plan without smaller ones."""
    parts = []
    for number, left in enumerate(plan.smaller):
        share = plan.predicted.seconds_per_minibatch / left.predicted.seconds_per_minibatch
        gpus, of_speed = (f" of {plan.cluster.gpus} GPUs", " of the speed") if number == 0 else ("", "")
        parts.append(f"{left.cluster.gpus}{gpus}: {share:.0%}{of_speed} ({left.config})")
    return ", ".join(parts) or None
