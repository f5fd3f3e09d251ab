"""Whether a model fits, and how few GPUs will do: each answer is that of `solve` for that number of
GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from planner.api.planning import price
from planner.api.running import _with_time_to_search
from planner.errors import PlannerError
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.files import replace as replace_record
from planner.formats.fit import Fit, FitRow, TrainingRun
from planner.formats.plan import Plan
from planner.formats.profile import Layer, Profile
from planner.options.solving import SolveOptions
from planner.options.verbs import FitOptions
from planner.reporting.tables.answers import fit_report
from planner.reporting.tables.plan import plan_report
from planner.schedule.one_stage import FLUSH
from planner.solver.clock import Clock
from planner.solver.find_plan import find_plan
from planner.solver.fit import FitRequest, fit
from planner.solver.request import Request
from planner.solver.sizes.microbatches import Profiles
from planner.solver.tuning.record import STANDARD
from tests.plan.test_blocks import transformer
from tests.samples import layer, profile
from tests.solver.test_degrees import divided

MB = 10**6
OPTIONS = SolveOptions(schedule=FLUSH, minibatch=32)


def model(size: int = 1) -> Profile:
    """Eight layers of 30 MB each with their gradients and optimizer state, and 1 MB of activations
    per sample.

    A second goes to launches, and one to each sample.
    """
    times = (100 * (1 + size), 200 * (1 + size))
    layers = (
        layer(f"l{n}", *times, output_bytes=8, weight_bytes=10 * MB, saved_bytes=size * MB)
        for n in range(8)
    )
    return profile(*layers, microbatch_size=size)


def cluster_of(gpus: int) -> Cluster:
    return flat_cluster(gpus, 1e9, 100 * MB)


def undivided(profile: Profile) -> Profile:
    return profile


def asked(
    gpus: int,
    cluster_of: Callable[[int], Cluster] = cluster_of,
    options: SolveOptions = OPTIONS,
    estimate: Callable[[int], Profile] = model,
    divide: Callable[[Profile], Profile] = undivided,
    sizes: Sequence[int] = (1,),
    ranks: int = 1,
    time_limit_s: float | None = 60.0,
) -> FitRequest:
    profiles = Profiles(estimate, divide, sizes, ranks)
    return FitRequest(profiles, gpus, cluster_of, options, Clock.of(time_limit_s))


def answered(gpus: int) -> Fit:
    return fit(asked(gpus))[0]


def test_fewer_gpus_are_tried_down_to_the_first_that_do_not_fit() -> None:
    answer = answered(8)
    assert answer.asked.plan is not None
    assert [(row.gpus, row.plan is not None) for row in answer.others] == [
        (4, True),
        (2, True),
        (1, False),
    ]
    for row in (answer.asked, *answer.others[:2]):
        assert row.plan is not None
        alone = find_plan(Request.of(model(), cluster_of(row.gpus), OPTIONS))
        assert row.plan.config == alone.config
        assert row.plan.predicted == alone.predicted
    assert answer.asked.plan.baselines


def test_no_row_of_its_table_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a search ran out of time: the answer is then the fastest of the ways that people
    use.
    """

    def worst(request: Request) -> Plan:
        cluster = request.cluster
        found = price(
            request.profile, cluster, cluster.gpus, replicas=1, schedule=FLUSH, microbatches=32
        )
        return found.model_copy(
            update={"solver": found.solver.model_copy(update={"lower_bound_s": 1e-6, "gap": 0.9})}
        )

    monkeypatch.setattr("planner.solver.solve.find_plan", worst)
    roomy = {gpus: flat_cluster(gpus, 1e9, 400 * MB) for gpus in (1, 2, 4)}
    plan = fit(asked(4, roomy.__getitem__))[0].asked.plan
    assert plan is not None
    names = {way.name: way for way in plan.baselines if not way.over_memory_bytes}
    fastest = min(names.values(), key=lambda way: way.seconds_per_microbatch)
    assert plan.config == fastest.config != "1-1-1-1"
    assert plan.predicted.seconds_per_minibatch == pytest.approx(
        32 * fastest.seconds_per_microbatch
    )
    assert plan.solver.gap == pytest.approx(1 - 1e-6 / plan.predicted.seconds_per_minibatch)

    def none(request: Request) -> Plan:
        raise PlannerError("the time limit passed before any plan was found")

    with monkeypatch.context() as patch:
        patch.setattr("planner.solver.solve.find_plan", none)
        same = fit(asked(4, roomy.__getitem__))[0].asked.plan
    assert same is not None
    assert same.stages == plan.stages
    assert same.predicted == plan.predicted

    rules: dict[str, SolveOptions] = {
        "level 0": replace(OPTIONS, shard_optimizer="never"),
        "level 1": replace(OPTIONS, shard_optimizer="always"),
        "none": replace(OPTIONS, recompute="always"),
    }
    known = model().model_copy(update={"optimizer_elementwise": True})
    for expected, options in rules.items():
        plan = fit(asked(4, roomy.__getitem__, options, lambda _: known))[0].asked.plan
        assert plan is not None
        found = f"level {plan.stages[0].level}" if plan.config == "4" else "none"
        assert found == expected


def test_a_usual_way_without_room_for_copies_is_not_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stages fit but for the copy of the embedding's weight in the second one; four have room
    for it.
    """
    tied = {"embed": ("embed.weight",), "head": ("head.bias", "embed.weight")}
    layers, made = list[Layer](), transformer(4, "h.{block}.part{part}")
    for each in made.layers:
        size = 800 if each.name in tied else 100
        sizes = {"weight_bytes": size, "gradient_bytes": size, "optimizer_bytes": 2 * size}
        layers.append(
            each.model_copy(update={**sizes, "parameters": tied.get(each.name, (each.name,))})
        )
    model = made.model_copy(update={"layers": tuple(layers)})

    def none(request: Request) -> Plan:
        raise PlannerError("the time limit passed before any plan was found")

    monkeypatch.setattr("planner.solver.solve.find_plan", none)
    options = replace(OPTIONS, recompute="never")
    found = dict[int, str | None]()
    for memory_bytes in (10_000, 11_000, 12_500, 13_000):
        roomy = {gpus: flat_cluster(gpus, 1e3, memory_bytes) for gpus in (1, 2, 4, 8, 16, 32, 64)}
        plan = fit(asked(4, roomy.__getitem__, options, lambda _: model))[0].asked.plan
        found[memory_bytes] = None if plan is None else plan.config
    assert found == {10_000: None, 11_000: "1-1-1-1", 12_500: "2-2", 13_000: "4"}


def test_where_it_does_not_fit_more_gpus_are_tried() -> None:
    answer = answered(1)
    assert answer.asked.plan is None
    assert [(row.gpus, row.plan is not None) for row in answer.others] == [(2, True)]


def test_where_time_runs_out_it_does_not_say_that_nothing_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(request: Request) -> Plan:
        raise PlannerError("the time limit passed before any plan was found")

    monkeypatch.setattr("planner.solver.solve.find_plan", none)
    answer = answered(1)  # which no usual way fits either
    assert answer.asked.unknown
    monkeypatch.undo()
    assert not answered(1).asked.unknown


def test_where_estimates_took_all_of_the_time_a_few_seconds_are_left_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # llama-2-70b on a machine that did other work: "not known: the time limit passed"
    def needs_a_second(request: Request) -> Plan:
        if request.clock.left_s is not None and request.clock.left_s < 1:
            raise PlannerError("the time limit passed before any plan was found")
        return find_plan(request)

    monkeypatch.setattr("planner.solver.solve.find_plan", needs_a_second)
    answer = fit(asked(1, time_limit_s=0.0))[0]
    assert answer.asked.why_not
    assert not answer.asked.unknown


def test_where_nothing_else_was_tried_it_says_so() -> None:
    text = fit_report(
        Fit(model="m", asked=FitRow(gpus=8, plan=None, why_not="too large"), others=())
    )
    assert text.endswith("no: too large; no other number of GPUs was tried")


def test_the_fastest_size_of_microbatches_is_the_answer() -> None:
    answer, profile = fit(asked(2, sizes=(1, 2, 4, 8, 16)))
    assert answer.asked.plan is not None
    alone = {size: find_plan(Request.of(model(size), cluster_of(2), OPTIONS)) for size in (1, 2, 4)}
    seconds = {size: plan.predicted.seconds_per_minibatch for size, plan in alone.items()}
    # larger ones are more efficient until they must recompute
    assert seconds[2] < seconds[4] < seconds[1]
    assert profile == model(2)
    assert answer.asked.plan.config == alone[2].config


def test_what_cannot_be_the_answer_is_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that would have to recompute, and divided layers where data parallelism is as good as
    perfect balance.

    Nor is a plan sought for a size with which even perfect balance is slower than the plan for
    another one.
    """
    sizes, divisions, sought = list[int](), list[int](), list[tuple[int | None, int]]()

    def seek(request: Request) -> Plan:
        sought.append((request.profile.microbatch_size, request.cluster.gpus))
        return find_plan(request)

    monkeypatch.setattr("planner.solver.solve.find_plan", seek)

    def profile_at(size: int) -> Profile:
        sizes.append(size)
        return model(size)

    def divided(profile: Profile) -> Profile:
        divisions.append(profile.microbatch_size or 0)
        return profile

    def cluster_of(gpus: int) -> Cluster:
        # beside 160 MB of weights and gradients room for two samples
        return flat_cluster(gpus, 1e12, 181 * MB)

    answer, _ = fit(asked(4, cluster_of, OPTIONS, profile_at, divided, (1, 2, 4, 8), ranks=2))
    plan = answer.asked.plan
    assert plan is not None
    assert (plan.config, plan.microbatch_size) == ("4", 2)
    assert sizes == [1, 2]
    assert divisions == []
    assert [size for size, gpus in sought if gpus == 4] == [2]
    # Where messages take long, both are worth a look.
    slow, _ = fit(
        asked(
            4, lambda gpus: flat_cluster(gpus, 1e3, 400 * MB), OPTIONS, profile_at, divided, ranks=2
        )
    )
    assert slow.asked.plan is not None
    assert divisions == [1]


def test_what_the_time_did_not_suffice_for_is_said() -> None:
    """As on a machine without any time: two sizes of microbatches are looked at, and the best on
    the line through them.
    """
    sizes = (1, 2, 4, 8, 16)

    def slow(gpus: int) -> Cluster:
        return flat_cluster(gpus, 1e4, 800 * MB)

    answer, profile = fit(asked(2, slow, sizes=sizes, ranks=2, time_limit_s=0.0))
    assert profile == model(16)
    assert answer.not_tried == ("microbatches of 8", "tensor parallelism", "1 GPU")

    # The larger ones are less far apart, so that two of them may be about as fast as the answer's.
    more_sizes = (1, 2, 4, 8, 16, 32, 64)
    larger = replace(OPTIONS, minibatch=128)
    answer, profile = fit(asked(2, slow, larger, sizes=more_sizes, time_limit_s=0.0))
    assert profile == model(64)
    assert answer.not_tried == ("microbatches of 16, 32", "1 GPU")
    text = fit_report(answer)
    assert text.endswith("before it tried: microbatches of 16, 32; 1 GPU")

    unhurried, same = fit(asked(2, slow, larger, sizes=more_sizes))
    assert unhurried.not_tried == ()
    assert same == profile, "the same size as without any time"


def test_few_sizes_are_estimated_however_many_there_are() -> None:
    """The two smallest, the best on the line through them, and the one beside it."""
    sizes = list[int]()

    def profile_at(size: int) -> Profile:
        sizes.append(size)
        return model(size)

    def fast(gpus: int) -> Cluster:
        return flat_cluster(gpus, 1e12, 40_000 * MB)

    many = replace(OPTIONS, minibatch=2 * 1024)
    powers = [2**power for power in range(11)]
    answer, _ = fit(asked(2, fast, many, profile_at, sizes=powers))
    assert answer.asked.plan is not None
    assert answer.asked.plan.microbatch_size == 1024
    assert sizes == [1, 2, 1024, 512]


def test_the_length_of_a_training_gives_days_and_cost_for_every_number_of_gpus() -> None:
    """The more GPUs, the fewer days; where each adds less than the one before, the more dollars."""
    run = TrainingRun(tokens=10**9, dollars_per_gpu_hour=2.0)

    def tokens(size: int) -> Profile:
        return model(size).model_copy(update={"tokens_per_sample": 1000})

    def roomy(gpus: int) -> Cluster:
        return flat_cluster(gpus, 1e6, 400 * MB)

    answer, _ = fit(replace(asked(8, roomy, estimate=tokens), run=run))
    assert [row.gpus for row in answer.rows] == [32, 16, 8, 4, 2, 1]
    fastest, cheapest = answer.fastest_row, answer.cheapest_row
    assert fastest is not None
    assert fastest.days is not None
    assert cheapest is not None
    assert cheapest.dollars is not None
    for row in answer.rows:
        assert row.plan is not None
        assert row.days is not None
        assert row.dollars is not None
        seconds = 10**9 / 1000 / 32 * row.plan.predicted.seconds_per_minibatch
        assert row.days == pytest.approx(seconds / 86400)
        assert row.dollars == pytest.approx(seconds / 3600 * row.gpus * 2)
        assert row.days >= fastest.days
        assert row.dollars >= cheapest.dollars

    text = fit_report(answer)
    assert "a training on 1B tokens: 8 GPUs, " in text
    assert f"fastest of these: {fastest.gpus} GPU" in text
    assert f"cheapest of these: {cheapest.gpus} GPU" in text
    without, _ = fit(asked(8, roomy, estimate=tokens))
    assert [row.gpus for row in without.rows] == [8, 4, 2, 1]
    assert "days" not in fit_report(without)


def test_a_small_minibatch_is_that_of_every_row() -> None:
    """Replicas that have no microbatch would make the minibatch larger: such rows use fewer
    GPUs.
    """
    known = model().model_copy(update={"optimizer_elementwise": True})
    roomy = replace(OPTIONS, minibatch=4)
    plan = fit(asked(8, lambda gpus: flat_cluster(gpus, 1e12, 400 * MB), roomy, lambda _: known))[
        0
    ].asked.plan
    assert plan is not None
    assert plan.samples_per_update == (4, 4)
    assert {way.samples_per_update for way in plan.baselines} == {(4, 4)}
    rows = {way.name: way for way in plan.baselines}
    assert rows["data parallel"].config == rows["ZeRO-3, FSDP"].config == "4"
    fastest = min(way.seconds_per_microbatch for way in plan.baselines if not way.over_memory_bytes)
    assert plan.predicted.seconds_per_minibatch / plan.microbatches <= fastest * (
        1 + STANDARD.answer.indistinguishable_share
    )
    assert "data parallel on 4 GPUs" in plan_report(plan)


def test_degrees_that_were_named_are_estimated_and_hold_where_gpus_make_groups() -> None:
    """Also where data parallelism is as good as perfect balance, and others are not worth it."""

    def roomy(gpus: int) -> Cluster:
        return flat_cluster(gpus, 1e12, 400 * MB)

    def in_two(profile: Profile) -> Profile:
        return divided(profile, 2)

    named = replace(OPTIONS, tensor=(1, 2))
    answer, profile = fit(asked(4, roomy, named, divide=in_two, ranks=2))
    assert profile.tensor is not None
    assert [row.plan is not None for row in answer.rows] == [True, True, True]

    only = replace(OPTIONS, tensor=(2,))
    answer, _ = fit(asked(4, roomy, only, divide=in_two, ranks=2))
    assert [None if row.plan is None else row.plan.config for row in answer.rows] == [
        "2x2",
        "1x2",
        None,
    ]
    assert answer.others[-1].why_not == "no groups of 2 ranks in 1 GPU"


def test_where_no_usual_way_fits_layers_are_divided_whatever_the_time() -> None:
    """As for the largest models, whose estimate may take all of it. Where one fits, time counts."""
    divisions = list[int]()

    def in_two(profile: Profile) -> Profile:
        divisions.append(profile.microbatch_size or 0)
        return divided(profile, 2)

    def tight(gpus: int) -> Cluster:
        return flat_cluster(gpus, 1e12, 30 * MB)

    answer, profile = fit(asked(16, tight, divide=in_two, ranks=2, time_limit_s=0.0))
    assert divisions == [1]
    assert profile.tensor is not None
    assert "tensor parallelism" not in answer.not_tried
    assert answer.asked.plan is not None
    assert answer.asked.plan.ranks_per_replica == 2

    roomy, _ = fit(
        asked(16, lambda gpus: flat_cluster(gpus, 1e4, 400 * MB), ranks=2, time_limit_s=0.0)
    )
    assert "tensor parallelism" in roomy.not_tried


def test_where_no_usual_way_fits_experts_are_divided_first() -> None:
    """Two ranks have half of the experts each, and share a microbatch of two samples: at one
    sample, the smallest size, nobody can divide them, and nothing fits.
    """
    sizes = list[int]()

    def mixture(size: int) -> Profile:
        sizes.append(size)
        plain = model(size)
        layers = tuple(replace_record(each, op="Experts") for each in plain.layers)
        return replace_record(plain, layers=layers)

    def in_two(profile: Profile) -> Profile:
        if (profile.microbatch_size or 1) % 2:
            return profile
        known = divided(profile, 2)
        (costs,) = known.tensor or ()
        costs = replace_record(costs, by_samples=True, experts=(2,) * len(known.layers))
        return replace_record(known, tensor=(costs,))

    def tight(gpus: int) -> Cluster:
        return flat_cluster(gpus, 1e12, 30 * MB)

    asked_of = asked(16, tight, estimate=mixture, divide=in_two, sizes=(1, 2, 4), ranks=2)
    answer, profile = fit(replace(asked_of, only_asked=True))
    plan = answer.asked.plan
    assert plan is not None
    assert plan.by_samples
    assert plan.ranks_per_replica == plan.microbatch_size == profile.microbatch_size == 2
    assert sizes[:2] == [1, 2], "the smallest size, and the one that two ranks share"
    assert plan.baselines
    assert all(way.over_memory_bytes for way in plan.baselines)

    again, _ = fit(replace(asked_of, only_asked=True))
    assert again.asked.plan is not None
    assert again.asked.plan.config == plan.config

    # Where no experts are divided, whole layers are searched, and why they do not fit is explained.
    whole, _ = fit(
        replace(asked(16, tight, estimate=mixture, sizes=(1, 2), ranks=2), only_asked=True)
    )
    assert whole.asked.plan is not None
    assert not whole.asked.plan.divides_layers

    def too_tight(gpus: int) -> Cluster:
        return flat_cluster(gpus, 1e12, 12 * MB)

    none, _ = fit(
        replace(asked(4, too_tight, estimate=mixture, sizes=(1, 2), ranks=2), only_asked=True)
    )
    assert none.asked.plan is None
    assert none.asked.hint


def test_a_search_has_a_share_of_the_limit_however_long_a_model_took_to_read() -> None:
    """A quarter of 60 s is computed, in up to three times as long on a busy machine."""
    options = FitOptions(time_limit_s=60)
    soon = _with_time_to_search(Clock.of(1.0), options)
    assert soon.left_s == pytest.approx(15, abs=1)
    assert soon.at_s is not None
    assert soon.at_s - time.monotonic() == pytest.approx(45, abs=1)

    enough = Clock.of(30.0)
    assert _with_time_to_search(enough, options) is enough
    endless = Clock.of(None)
    assert _with_time_to_search(endless, FitOptions(time_limit_s=None)) is endless
