"""Solve again for the devices and links as a run measured them: a process beside a run.

    python -m planner.api.corrected PROFILE

waits until its input names a folder, reads plan.json, run.json, longer.json and left-out.json
there, and writes answer.json. It ends without an answer where its input ends.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from planner.analysis.few_kinds import with_few_kinds
from planner.analysis.idle_workers import without_idle_workers
from planner.analysis.longer_work import (
    all_slower,
    longer_layers,
    profile_of_longer,
    slow_devices,
)
from planner.analysis.measured_cluster import kinds_of_speeds, measured_cluster, on_cluster
from planner.analysis.recut import recut
from planner.errors import PlannerError
from planner.formats.cluster import Cluster
from planner.formats.drift import Corrected
from planner.formats.files import replace, save_record
from planner.formats.plan import Plan, load_plan
from planner.formats.profile import Profile, load_profile
from planner.formats.timeline import Timeline, load_timeline
from planner.plan.left_out import why_nobody
from planner.solver.clock import Clock
from planner.solver.request import Request, options_asked
from planner.solver.solve import solve
from planner.solver.tuning.record import STANDARD, Tuning
from planner.terminal import printable

LONGER = "longer.json"  # by layer, how many times as long as profiled it takes
LEFT_OUT = "left-out.json"  # by rank of a worker without stages, its seconds relative to the plan's
# As the threads of workers that compute. With a lower priority, a search would hardly run on full
# cores, and the run would go on under the wrong plan.
_NICER = 5


def corrected(
    profile: Profile,
    plan: Plan,
    run: Timeline,
    tuning: Tuning = STANDARD,
    longer: Mapping[str, float] | None = None,
    left_out: Mapping[int, float] | None = None,
) -> Corrected:
    """Return what a plan gives on the cluster that a run of it measured, and a faster plan for the
    same minibatches.

    Plans nearer to each other than predictions err are the same plan.

    Args:
        profile: that the plan was solved from.
        plan: that was run.
        run: what it measured.
        tuning: what counts as another device, link or plan.
        longer: by layer, how many times as long as profiled it took when the plan was solved.
        left_out: by rank, what workers without stages measured: seconds relative to the plan's.

    Raises:
        PlanError: for another profile than the plan's.
        InputError: for a run that recorded too little.
    """
    found = measured_cluster(plan, run, tuning.measured, left_out or {})
    cluster = found.cluster
    longer = dict(longer or {})
    if all_slower(found, tuning.measured):
        slow = slow_devices(found.workers, tuning.measured)
        of_work = [
            replace(worker, speed=worker.speed / slow.get(worker.rank, 1.0))
            for worker in found.workers
        ]
        longer = longer_layers(plan, of_work, longer)
        cluster = replace(cluster, kinds=kinds_of_speeds(plan.cluster, slow, tuning.measured))

    work = profile_of_longer(profile, longer)
    if plan.profile_digest == profile.digest:  # or it is refused
        plan = replace(plan, profile_digest=work.digest)
    there = on_cluster(work, plan, cluster)
    expected_s = there.predicted.seconds_per_minibatch

    # A loss that is no mean was accepted, or else the plan would not run.
    options = replace(options_asked(plan), accept_divided_loss=True)
    searched = with_few_kinds(cluster, tuning.mixed.most_kinds)
    request = Request.of(work, searched, options, tuning)
    better = solve(replace(request, clock=_clock_beside_a_run(tuning)))
    if searched != cluster:
        better = on_cluster(work, better, cluster)
    # Other cuts of the same stages are found soon, where the search was not over; where noise makes
    # many kinds; and who leaves out a worker loses what it may be worth tomorrow.
    busy = recut(work, plan, cluster, _clock_beside_a_run(tuning))
    better = _preferred(better, busy, tuning)
    better = _all_measured(work, better, cluster, tuning)
    same_question = better.microbatches == plan.microbatches and better.schedule is plan.schedule
    gain = expected_s / better.predicted.seconds_per_minibatch
    if not same_question or gain < 1 + tuning.measured.same_pace:
        return Corrected(expected_s=expected_s)
    # The next answer begins with the profile as it was, too.
    better = replace(better, profile_digest=profile.digest)
    return Corrected(expected_s=expected_s, better=better, longer=longer)


def _clock_beside_a_run(tuning: Tuning) -> Clock:
    """Return the clock of a search, whose processors training shares."""
    measured = tuning.measured
    wall_s = measured.solving_s * measured.max_wall_per_cpu_second
    return Clock.of(
        wall_s, tuning=tuning.clock, computing_share=1 / measured.max_wall_per_cpu_second
    )


def _preferred(better: Plan, busy: Plan, tuning: Tuning) -> Plan:
    """Return the plan to move to: one on fewer workers where it can be trained, and is faster than
    all that predictions err by than `busy`, other cuts of what is run; or else the faster one.
    """
    gain = busy.predicted.seconds_per_minibatch / better.predicted.seconds_per_minibatch
    if better.workers >= busy.workers:
        return better if gain >= 1 else busy
    if why_nobody(better):
        return busy
    return better if gain >= 1 + tuning.measured.same_pace else busy


def _all_measured(profile: Profile, plan: Plan, cluster: Cluster, tuning: Tuning) -> Plan:
    """Return a plan each of whose workers tells how fast its device is; one that hardly computes
    is left out, where that is about as fast.
    """
    measured = tuning.measured
    found = without_idle_workers(profile, plan, cluster, measured.least_busy)
    if found.microbatches != plan.microbatches or why_nobody(found):
        return plan
    slower = found.predicted.seconds_per_minibatch / plan.predicted.seconds_per_minibatch
    return found if slower < 1 + measured.same_pace else plan


def main(profile: Path) -> int:
    """Answer the question in the folder that the input names; return the exit code."""
    os.nice(_NICER)
    name = sys.stdin.readline().rstrip("\n")
    if not name:
        return 0
    folder = Path(name)
    left_out = json.loads((folder / LEFT_OUT).read_text("utf-8"))
    try:
        answer = corrected(
            load_profile(profile),
            load_plan(folder / "plan.json"),
            load_timeline(folder / "run.json"),
            longer=json.loads((folder / LONGER).read_text("utf-8")),
            left_out={int(rank): ratio for rank, ratio in left_out.items()},
        )
    except PlannerError as error:
        sys.stderr.write(f"{printable(error.message)}\n")
        return error.exit_code

    save_record(answer, folder / "answer.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
