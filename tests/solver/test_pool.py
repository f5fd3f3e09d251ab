"""The pool simulates what may be the answer, and nothing else; it keeps the best, and knows what
others lacked.
"""

from __future__ import annotations

from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import flat_cluster
from planner.options.solving import Progress
from planner.schedule.registry import find
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.improve.improvement import least_late
from planner.solver.pool import Pool
from planner.solver.problem.problem import Problem
from tests.cost.test_overheads import on_cuda
from tests.cost.test_weight_copies import tied
from tests.samples import layer, profile

LAYERS = [
    layer(f"h{n}", 1.0, 2.0, output_bytes=10, weight_bytes=100, saved_bytes=10) for n in range(8)
]
EVEN = candidates([range(4), range(4, 8)], [1, 1])
UNEVEN = candidates([range(6), range(6, 8)], [1, 1])


def asked(schedule: str = "1f1b-flush", memory_bytes: int | None = None) -> Problem:
    microbatches = 8 if find(schedule).divides else 1
    return Problem(
        LayerCosts(profile(*LAYERS)),
        Setting(flat_cluster(2, 1e6, memory_bytes), find(schedule), microbatches),
    )


def test_a_candidate_that_is_slower_without_waiting_is_not_simulated() -> None:
    pool = Pool(asked(), 0.0)
    pool.consider([EVEN])
    assert pool.best is not None
    assert pool.best.simulated
    assert pool.priced(UNEVEN).seconds > pool.best.seconds
    count = pool.problem.budget.count
    pool.consider([UNEVEN])
    assert pool.problem.budget.count == count
    assert [stage.layers for stage in pool.best.stages] == [stage.layers for stage in EVEN]


def test_people_are_shown_the_best_plan_and_no_faster_one() -> None:
    """A candidate that does not fit, or that is priced for a table, is none to show."""
    problem = asked(memory_bytes=10_000)
    pool = Pool(problem, 0.0)
    progress = problem.clock.progress
    evaluate(asked(), EVEN)
    assert progress.config == ""
    pool.consider([UNEVEN])
    assert pool.best is not None
    assert (progress.config, progress.best_s) == (pool.best.config, pool.best.seconds)
    pool.consider([EVEN])
    assert (progress.config, progress.best_s) == (pool.best.config, pool.best.seconds)


def test_a_slower_plan_that_takes_the_place_of_the_best_is_shown() -> None:
    progress = Progress()
    progress.meet("2-2", 1.0)
    progress.meet("4", 1.04, instead_of_s=1.0)  # its gradients are less late
    progress.meet("1-3", 1.1, instead_of_s=1.08)  # of another search
    assert (progress.config, progress.best_s) == ("4", 1.04)


def test_the_most_promising_of_a_batch_comes_first() -> None:
    pool = Pool(asked(), 0.0)
    pool.consider([UNEVEN, EVEN])
    assert pool.problem.budget.count == 1
    assert pool.best is not None
    assert [stage.layers for stage in pool.best.stages] == [stage.layers for stage in EVEN]


def test_what_was_simulated_before_is_not_simulated_again() -> None:
    pool = Pool(asked(), 0.0)
    pool.consider([UNEVEN])
    pool.consider([UNEVEN])
    assert pool.problem.budget.count == 1


def test_a_plan_that_is_late_by_less_and_nearly_as_fast_is_the_answer() -> None:
    """Two stages take 12 s a minibatch; one stage on two replicas takes a little longer, and is
    never late.
    """
    heavier = [each.model_copy(update={"update_s": 0.05}) for each in LAYERS]
    setting = Setting(flat_cluster(2, 1e4), find("1f1b"))
    pool = Pool(Problem(LayerCosts(profile(*heavier)), setting), 0.0)
    alone = candidates([range(8)], [2])
    pool.consider([EVEN])
    assert pool.best is not None
    speedup = pool.problem.tuning.evaluate.min_speedup_per_stale_update
    assert pool.best.seconds < pool.priced(alone).seconds < pool.best.seconds * speedup
    pool.consider([alone])
    assert len(pool.best.stages) == 2
    least_late(pool)
    assert len(pool.best.stages) == 1


def test_only_a_relaxation_raises_the_bound() -> None:
    pool = Pool(asked(), 1.0)
    pool.raise_bound(2.0)
    assert pool.bound_s == 1.0
    pool.relaxed = True
    pool.raise_bound(2.0)
    assert pool.bound_s == 2.0


def test_a_candidate_that_lacks_room_is_known_and_not_the_answer() -> None:
    held = max(Pool(asked(), 0.0).priced(EVEN).price.gpu_bytes)
    pool = Pool(asked(memory_bytes=held - 1), 0.0)
    pool.consider([EVEN])
    assert pool.best is None
    assert pool.crowded is not None


def test_a_candidate_recomputes_to_make_room_for_communicators() -> None:
    layers = [each.model_copy(update={"saved_bytes": 10**9}) for each in LAYERS]
    model = on_cuda(profile(*layers), context_bytes=10**8)
    setting = Setting(flat_cluster(2, 1e9), find("1f1b-flush"), 8)
    held = max(Pool(Problem(LayerCosts(model), setting), 0.0).priced(EVEN).price.gpu_bytes)
    tight = Setting(flat_cluster(2, 1e9, held - 10**8), find("1f1b-flush"), 8)
    pool = Pool(Problem(LayerCosts(model), tight), 0.0)
    pool.consider([EVEN])
    assert pool.best is not None
    assert pool.best.fits(tight.cluster)
    assert any(stage.options.recompute for stage in pool.best.stages)


def test_a_candidate_whose_copies_cannot_be_kept_equal_is_known_and_not_the_answer() -> None:
    """Under 1f1b, copies of a tied weight on unlike numbers of replicas are updated at unlike
    times.
    """
    model = tied()
    last = len(model.layers)
    pool = Pool(Problem(LayerCosts(model), Setting(flat_cluster(4, 1e4), find("1f1b"))), 0.0)
    pool.consider([candidates([range(last - 1), range(last - 1, last)], [2, 1])])
    assert pool.best is None
    assert pool.untrained is not None
    pool.consider([candidates([range(last - 1), range(last - 1, last)], [2, 2])])
    assert pool.best is not None
