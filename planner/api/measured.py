"""The cluster of a plan that was run, as its run measured it: `planner.measured_cluster`."""

from pathlib import Path

from planner.analysis.measured_cluster import MeasuredCluster
from planner.analysis.measured_cluster import measured_cluster as measured
from planner.arguments import checked
from planner.formats.plan import Plan, load_plan
from planner.formats.timeline import Timeline
from planner.reporting.trace import load_run


@checked
def measured_cluster(plan: Plan | str | Path, run: Timeline | str | Path) -> MeasuredCluster:
    """Return a plan's cluster with devices and links as fast as a run of the plan found them.

    `solve` for its `cluster`, and the second run is planned from the first. Workers whose
    computations take within 5% of what was planned are as fast as planned; the others become kinds
    of devices with a speed. Rates of links come from messages whose receiver waited for them; those
    within 25% of the plan's stay as they are, and so do links that no such message crossed.
    Latencies, and exchanges of gradients beside messages, are not measured.

    Args:
        plan: the plan that was run, or the path of its file.
        run: its recorded timeline, or the file that `train` wrote with `trace`.

    Raises:
        PlanError: for a file that holds no plan.
        InputError: for a run of another plan, or one that recorded too little.
    """
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    return measured(plan, run if isinstance(run, Timeline) else load_run(run))
