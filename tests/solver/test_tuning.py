"""The question carries its tuned numbers: nothing reads them anywhere else."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest

from planner.analysis.given_plan import GivenPlan
from planner.errors import InfeasibleError
from planner.formats.cluster import Cluster, DeviceKind, flat_cluster, hierarchical_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.solver.clock import Clock
from planner.solver.fit import FitRequest, fit
from planner.solver.request import Request
from planner.solver.sizes.microbatches import Profiles
from planner.solver.solve import solve
from planner.solver.tuning.record import STANDARD, Tuning
from tests.samples import layer, profile

MODEL = profile(
    layer("a", 1, 2, output_bytes=8, weight_bytes=10, saved_bytes=20),
    layer("b", 2, 3, output_bytes=6, weight_bytes=60, saved_bytes=10),
    layer("c", 1, 1, output_bytes=4, weight_bytes=10, saved_bytes=20),
    layer("d", 3, 5, output_bytes=2, weight_bytes=40, saved_bytes=10),
    layer("e", 1, 2, output_bytes=6, weight_bytes=80, saved_bytes=10),
    layer("f", 2, 4, weight_bytes=20, saved_bytes=10),
)
FLAT = flat_cluster(4, 20.0)
TIGHT = flat_cluster(4, 20.0, memory_bytes=260)
SERVERS = hierarchical_cluster((2, 2), (40.0, 10.0))
MIXED = FLAT.model_copy(
    update={"kinds": (DeviceKind(count=2, speed=2.0), DeviceKind(count=2, speed=1.0))},
)

QUESTIONS: dict[str, tuple[Cluster, SolveOptions]] = {
    "1f1b": (FLAT, SolveOptions(schedule="1f1b")),
    "2bw": (SERVERS, SolveOptions(schedule="2bw", microbatches=8)),
    "memory": (TIGHT, SolveOptions(schedule="1f1b-flush", microbatches=8)),
    "levels": (SERVERS, SolveOptions(schedule="1f1b-flush", microbatches=8)),
    "chunks": (FLAT, SolveOptions(schedule="interleaved", microbatches=8)),
    "mixed": (MIXED, SolveOptions(schedule="1f1b")),
    "mixed, synchronous": (MIXED, SolveOptions(schedule="gpipe", microbatches=8)),
    "program": (FLAT, SolveOptions(schedule="1f1b", solver="ilp")),
    "every schedule": (FLAT, SolveOptions(schedule="auto", microbatches=8)),
    "fewer hosts": (SERVERS, SolveOptions(schedule="1f1b-flush", microbatches=8, survive=1)),
}


@dataclass(frozen=True)
class _Unread:
    """In place of a group of the standard record: whoever reads it has not read the question's."""

    group: str

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"read {self.group}.{name} of the standard record")


@pytest.fixture
def _standard_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    for group in fields(Tuning):
        monkeypatch.setitem(vars(STANDARD), group.name, _Unread(group.name))


def untimed(plan: Plan) -> Plan:
    """Return a plan without how long the search for it took."""
    solver = plan.solver.model_copy(update={"seconds": 0.0})
    smaller = tuple(map(untimed, plan.smaller))
    return plan.model_copy(update={"solver": solver, "smaller": smaller})


@pytest.fixture(scope="module")
def answers() -> dict[str, Plan]:
    """The plans by the standard record, found before anything takes its place."""
    return {
        name: untimed(solve(Request.of(MODEL, *question, patient())))
        for name, question in QUESTIONS.items()
    }


def patient() -> Tuning:
    """Return a record of its own, by which no search ends with its time on a busy machine."""
    record = Tuning()
    return replace(record, answer=replace(record.answer, alternatives_s=600.0))


@pytest.mark.usefixtures("_standard_unread")
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_with_a_record_of_its_own_reads_no_other(
    name: str,
    answers: dict[str, Plan],
) -> None:
    cluster, options = QUESTIONS[name]
    assert untimed(solve(Request.of(MODEL, cluster, options, patient()))) == answers[name]


@pytest.mark.usefixtures("_standard_unread")
def test_what_would_make_a_plan_fit_is_sought_with_the_record_of_the_question() -> None:
    small = flat_cluster(4, 20.0, memory_bytes=20)
    options = SolveOptions(schedule="1f1b-flush", microbatches=8)
    request = Request.of(MODEL, small, options, Tuning())
    with pytest.raises(InfeasibleError, match="smallest memory"):
        solve(request)


@pytest.mark.usefixtures("_standard_unread")
def test_fit_asks_each_of_its_questions_with_its_record() -> None:
    def estimate(size: int) -> Profile:
        return MODEL.model_copy(update={"microbatch_size": size})

    profiles = Profiles(estimate, divide=lambda costs: costs, sizes=(1, 2))
    options = SolveOptions(schedule="1f1b-flush", minibatch=16)
    request = FitRequest(
        profiles, 4, lambda gpus: flat_cluster(gpus, 20.0), options, Clock(), Tuning()
    )
    answer, _ = fit(request)
    assert answer.asked.plan is not None
    assert [row.gpus for row in answer.others] == [2, 1]


@pytest.mark.usefixtures("_standard_unread")
def test_a_given_plan_is_priced_with_its_record(answers: dict[str, Plan]) -> None:
    given = GivenPlan.of(MODEL, answers["levels"], Clock(), Tuning())
    assert given.problem.tuning == given.problem.limits.tuning == Tuning()
    assert given.price().seconds_per_minibatch == given.seconds


def test_the_record_decides(answers: dict[str, Plan]) -> None:
    """Where each update that gradients are later must pay a hundredfold, the answer is less
    late.
    """
    cluster, options = QUESTIONS["1f1b"]
    never_late = replace(STANDARD.evaluate, min_speedup_per_stale_update=100.0)
    plan = solve(Request.of(MODEL, cluster, options, replace(STANDARD, evaluate=never_late)))
    assert plan.schedule is answers["1f1b"].schedule
    assert plan.staleness < answers["1f1b"].staleness
