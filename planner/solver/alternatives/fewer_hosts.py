"""The plans for the GPUs that are left when hosts are lost."""

from collections.abc import Iterator

from planner.errors import ClusterError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.solver.find_plan import find_plan
from planner.solver.problem.infeasible import explained
from planner.solver.request import Request


def fewer_hosts(cluster: Cluster, most: int) -> Iterator[Cluster]:
    """Yield the cluster without one host, without two, up to `most`; GPUs that are all joined alike
    are a host each.

    Raise ClusterError where that depends on which host is lost, or where none would be left.
    """
    joined = cluster.joined
    if cluster.kinds or len(joined) > 2:
        what = "of several kinds" if cluster.kinds else f"on {len(joined)} levels"
        raise ClusterError(
            f"which GPUs {what} are left depends on which host is lost",
            hint="solve for what is left without `survive`, for each host that may be lost",
        )

    hosts = joined[-1].size
    if most >= hosts:
        raise ClusterError(
            f"of {hosts} hosts not {most} can be lost",
            hint=f"give `survive={hosts - 1}` or fewer",
        )

    for left in range(hosts - 1, hosts - most - 1, -1):
        outer = replace(joined[-1], size=left)
        yield replace(cluster, levels=(*joined[:-1], outer))


def with_fewer_hosts(plan: Plan, request: Request) -> Plan:
    """Return the plan with the fastest plans for up to `options.survive` hosts fewer, or a note why
    there is none.

    They train the same minibatches under the same schedule, so that a run can go on with any of
    them.
    """
    clusters = list(fewer_hosts(plan.cluster, request.options.survive))
    options = replace(
        request.options,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        minibatch=None,
        survive=0,
    )

    same = request.with_options(options)

    smaller = list[Plan]()
    for number, cluster in enumerate(clusters):
        share = 1 / (len(clusters) - number)
        try:
            smaller.append(find_plan(same.on(cluster).within(share)))
        except PlannerError as error:  # no plan fits, or none takes so many microbatches
            # Still fewer GPUs have less memory in all.
            plan = plan.noting(
                f"The loss of {number + 1} hosts cannot be survived: {explained(error).message}."
            )
            break

    return replace(plan, smaller=tuple(smaller))
