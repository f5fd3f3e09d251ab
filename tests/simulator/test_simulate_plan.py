"""Simulated runs of plans: by hand, against the quick simulation, and by the rules that all of them
keep.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

import planner
from planner.errors import InputError, PlanError
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.plan import Plan
from planner.formats.timeline import Event, Timeline
from planner.schedule.one_stage import TWO_BW
from planner.simulator.simulate_plan import costs_of, simulate, simulated_s
from planner.simulator.summary import summarize
from tests.samples import layer
from tests.simulator.pipelines import simulate_costs
from tests.simulator.plans import equal_layers, plan_of

KINDS: list[tuple[str, int]] = [
    ("1f1b", 1),
    ("2bw", 4),
    ("1f1b-flush", 4),
    ("gpipe", 4),
    ("zb-h1", 4),
]


def of(timeline: Timeline, rank: int, kind: str) -> list[tuple[str, float, float]]:
    """Name, start and end of the events of a kind on a worker."""
    return [
        (timeline.name_of(event), event.start_s, event.end_s)
        for event in timeline.events.rows()
        if event.rank == rank and event.kind == kind
    ]


def check(timeline: Timeline, plan: Plan) -> None:
    """What no run may break: everything once and whole, one thing at a time, nothing before what it
    needs.
    """
    lanes: dict[tuple[int, str], list[Event]] = defaultdict(list)
    ends: dict[tuple[str, tuple[int, int, int]], float] = {}
    starts: dict[tuple[str, tuple[int, int, int]], float] = {}
    for event in timeline.events.rows():
        if event.lane != "all-reduce":
            lanes[event.rank, event.lane].append(event)
        kind = "backward" if event.kind == "backward_input" else event.kind
        key = kind, (event.stage, event.minibatch, event.microbatch)
        if event.lane == "compute":
            assert key not in ends or event.kind == "update"  # which each replica has
        ends[key], starts[key] = event.end_s, event.start_s
    for (_, lane), events in lanes.items():
        for one, other in pairwise(events):  # messages may share a link
            assert lane != "compute" or one.end_s <= other.start_s + 1e-12, (one, other)
    for link in timeline.links:
        assert all(
            end <= start + 1e-12 for end, start in zip(link.end_s, link.start_s[1:], strict=False)
        )
        assert all(0 < share <= 1 + 1e-9 for share in link.share)
    units = plan.microbatches * timeline.minibatches
    for kind in ("forward", "backward"):
        assert sum(1 for each, _ in ends if each == kind) == units * len(plan.stages)
    for transfer in plan.transfers:
        for minibatch in range(timeline.minibatches):
            for microbatch in range(plan.microbatches):
                here, there = (
                    (stage, minibatch, microbatch) for stage in (transfer.source, transfer.target)
                )
                assert ends["forward", here] <= starts["forward", there]
                if transfer.gradient_bytes:
                    assert ends["backward", there] <= starts["backward", here]
    assert [curve.rank for curve in timeline.memory] == list(timeline.workers)
    for curve in timeline.memory:
        stage = next(s for s, each in enumerate(plan.stages) if curve.rank in each.ranks)
        assert max(curve.held_bytes) <= plan.memory_bytes(stage)


def test_two_stages_by_hand() -> None:
    """10 bytes at 20 bytes/s: half a second for activations and for gradients."""
    plan = plan_of(equal_layers(2, output_bytes=10), (1, 1), flat_cluster(2, 20.0))
    timeline = simulate(plan, 2)
    check(timeline, plan)
    assert of(timeline, 0, "forward") == [("F0", 0.0, 1.0), ("F1", 1.0, 2.0)]
    assert of(timeline, 0, "send_activation") == [("A0", 1.0, 1.5), ("A1", 2.0, 2.5)]
    assert of(timeline, 1, "receive_activation") == [("A0", 1.0, 1.5), ("A1", 2.0, 2.5)]
    assert of(timeline, 1, "forward") == [("F0", 1.5, 2.5), ("F1", 4.5, 5.5)]
    assert of(timeline, 1, "backward") == [("B0", 2.5, 4.5), ("B1", 5.5, 7.5)]
    assert of(timeline, 0, "receive_gradient") == [("G0", 4.5, 5.0), ("G1", 7.5, 8.0)]
    assert of(timeline, 0, "backward") == [("B0", 5.0, 7.0), ("B1", 8.0, 10.0)]
    assert timeline.span_s == 10.0
    sends = {link.name: link for link in timeline.links}["worker 0 sends"]
    assert (sends.start_s, sends.end_s) == ((1.0, 2.0), (1.5, 2.5))


@pytest.mark.parametrize(("schedule", "microbatches"), KINDS)
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 2, 4)])
def test_every_run_keeps_the_rules(
    replicas: tuple[int, ...], schedule: str, microbatches: int
) -> None:
    plan = plan_of(
        equal_layers(len(replicas), output_bytes=3, weight_bytes=5, saved_bytes=7),
        replicas,
        flat_cluster(sum(replicas), 10.0, latency_s=0.05),
        schedule=schedule,
        microbatches=microbatches,
    )
    check(simulate(plan, 9), plan)


def test_interleaved_runs_keep_the_rules() -> None:
    plan = plan_of(
        equal_layers(4, output_bytes=3, saved_bytes=5),
        (1,) * 4,
        flat_cluster(2, 10.0),
        schedule="interleaved",
        microbatches=4,
        chunks=2,
    )
    timeline = simulate(plan, 5)
    check(timeline, plan)
    assert timeline.pipeline_length == 2
    assert "F0.0'" in {name for name, *_ in of(timeline, 0, "forward")}


@pytest.mark.parametrize(("schedule", "microbatches"), KINDS)
@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (2, 1, 1), (1, 2)])
def test_the_pace_without_events_is_that_of_the_summary(
    replicas: tuple[int, ...], schedule: str, microbatches: int
) -> None:
    layers = [
        layer(f"l{i}", 1 + 0.3 * i, 2 - 0.2 * i, output_bytes=10 + i, update_s=0.1, weight_bytes=9)
        for i in range(len(replicas))
    ]
    plan = plan_of(
        layers, replicas, flat_cluster(4, 30.0), schedule=schedule, microbatches=microbatches
    )
    timeline = simulate(plan, 12)
    quick = simulate_costs(costs_of(plan), 12)
    last = len(replicas) - 1
    ends = [
        e.end_s
        for e in timeline.events.rows()
        if e.kind in ("backward", "backward_weight") and e.stage == last
    ]
    assert sorted(ends) == list(quick.ends_s)
    assert quick.seconds_per_minibatch == pytest.approx(
        summarize(timeline).seconds_per_minibatch, rel=1e-12
    )
    assert simulated_s(plan) == pytest.approx(
        summarize(simulate(plan)).seconds_per_minibatch, rel=1e-6
    )


def test_an_all_reduce_hides_behind_its_backward_but_for_the_last_bucket() -> None:
    """Data parallel on 2: the ring takes 2(r-1)/r·W/B = W/B seconds."""
    names = tuple(f"l.{n}" for n in range(12))
    block = layer("l", weight_bytes=60_000_000).model_copy(update={"parameters": names})
    for all_reduce_s, expected in ((1.2, 3.2), (6.0, 1 + 2 / 6 + 6.0)):
        plan = plan_of([block], (2,), flat_cluster(2, 60e6 / all_reduce_s))
        summary = summarize(simulate(plan, 40))
        assert summary.seconds_per_minibatch == pytest.approx(expected / 2)
        # The formula does not know when the first part is ready, and takes it to be there at once.
        first_s = 2 / 6 if all_reduce_s > 2 else 0.0
        assert summary.seconds_per_minibatch == pytest.approx(
            plan.predicted.seconds_per_minibatch + first_s / 2
        )


def test_the_all_reduce_of_one_large_weight_waits_for_the_whole_backward() -> None:
    for all_reduce_s in (1.2, 6.0):
        plan = plan_of(
            [layer("l", weight_bytes=60_000_000)], (2,), flat_cluster(2, 60e6 / all_reduce_s)
        )
        summary = summarize(simulate(plan, 40))
        assert summary.seconds_per_minibatch == pytest.approx((1 + 2 + all_reduce_s) / 2)


def test_without_gradients_there_is_nothing_to_reduce() -> None:
    timeline = simulate(plan_of([layer("l")], (2,)), 4)
    assert "all_reduce" not in timeline.events.kind
    assert timeline.span_s == 6.0


def test_all_reduces_and_messages_share_a_link() -> None:
    """Stage 0's links carry 6 bytes of activations, or of gradients, and 12 of the ring for each of
    its minibatches.
    """
    layers = [
        layer("a", 0.1, 0.2, output_bytes=6, weight_bytes=12),
        layer("b", 0.1, 0.2),
    ]
    plan = plan_of(layers, (2, 1), flat_cluster(3, 6.0), depths=(8, 1))
    timeline = simulate(plan, 200)
    check(timeline, plan)
    summary = summarize(timeline)
    # A round of two minibatches: 2 s of ring and 1 s of messages each way at least.
    assert summary.seconds_per_minibatch >= 1.5
    assert summary.workers[0].send_share > 0.7
    assert summary.busiest.startswith("the link of worker")


def test_devices_of_a_server_share_its_link() -> None:
    """Two of one server send to two of another: 10 bytes each at 10 bytes/s on the shared link,
    side by side.
    """
    layers = equal_layers(2, output_bytes=10)

    def arrivals(cluster: Cluster) -> list[float]:
        timeline = simulate(plan_of(layers, (2, 2), cluster), 2)
        return sorted(e.end_s for e in timeline.events.rows() if e.kind == "receive_activation")

    assert arrivals(hierarchical_cluster((2, 2), (100.0, 10.0))) == [3.0, 3.0]
    assert arrivals(hierarchical_cluster((2, 2), (100.0, 10.0), shared=False)) == [2.0, 2.0]
    timeline = simulate(plan_of(layers, (2, 2), hierarchical_cluster((2, 2), (100.0, 10.0))), 20)
    shared = {link.name for link in timeline.links if link.rank is None}
    assert shared == {
        f"workers {who} together {does}" for who in ("0-1", "2-3") for does in ("send", "receive")
    }
    assert {link.name for link in summarize(timeline).shared_links} == shared


def test_a_message_within_a_server_crosses_no_shared_link() -> None:
    cluster = hierarchical_cluster((2, 2), (100.0, 10.0), latencies_s=(0.5, 4.0))
    timeline = simulate(plan_of(equal_layers(4, output_bytes=10), (1,) * 4, cluster), 1)
    took = {
        (e.rank, e.peer_rank): e.end_s - e.start_s
        for e in timeline.events.rows()
        if e.kind == "send_activation"
    }
    assert took == pytest.approx({(0, 1): 0.1 + 0.5, (1, 2): 1.0 + 4.0, (2, 3): 0.1 + 0.5})


def test_what_recomputes_runs_its_forward_again() -> None:
    plan = plan_of(equal_layers(2, output_bytes=10, saved_bytes=50), (1, 1), recompute=True)
    timeline = simulate(plan, 1)
    check(timeline, plan)
    assert [end - start for _, start, end in of(timeline, 1, "recompute")] == [1.0]
    assert of(timeline, 1, "recompute")[0][2] == of(timeline, 1, "backward")[0][1]


def test_without_overlap_messages_are_the_processors_work() -> None:
    plan = plan_of(equal_layers(2, output_bytes=10), (1, 1), flat_cluster(2, 20.0, overlap=False))
    assert of(simulate(plan, 1), 0, "forward") == [("F0", 0.0, 1.25)]


def test_memory_comes_with_forwards_and_goes_with_backwards() -> None:
    """Weights of 10, gradients of 10, message buffers of 4 and 7 saved per minibatch; two in flight
    at stage 0.

    F0 0-1, F1 1-2, B0 4-6, F2 6-7, B1 7-9, F3 9-10, B2 10-12, B3 13-15. From its first update on
    stage 0 has a version of the weights for each of the two.
    """
    plan = plan_of(equal_layers(2, weight_bytes=10, saved_bytes=7), (1, 1))
    first, last = simulate(plan, 4).memory
    assert [round(time_s, 6) for time_s in first.time_s] == [0, 1, 6, 12, 15]
    assert first.held_bytes == (31, 38, 48, 41, 24)
    assert max(first.held_bytes) == plan.stages[0].memory.total_bytes
    assert set(last.held_bytes) == {24, 31}


@pytest.mark.parametrize("depths", [(4, 3, 2, 1), (7, 5, 2, 1)])
def test_peaks_are_what_the_plan_says(depths: tuple[int, ...]) -> None:
    plan = plan_of(
        equal_layers(4, output_bytes=2, weight_bytes=10, saved_bytes=7), (1,) * 4, depths=depths
    )
    timeline = simulate(plan, 40)
    peaks = [max(curve.held_bytes) for curve in timeline.memory]
    assert peaks == [stage.memory.total_bytes for stage in plan.stages]


def test_the_limit_is_that_of_the_device() -> None:
    plan = plan_of(equal_layers(1), (1,), flat_cluster(1, 1.0, memory_bytes=10**9))
    assert simulate(plan, 1).memory[0].limit_bytes == 10**9


def test_a_plan_that_waits_for_itself_is_refused() -> None:
    plan = plan_of(equal_layers(2, output_bytes=1), (1, 2), depths=(1, 2))
    with pytest.raises(
        PlanError, match=r"wait for each other for ever: in_flight \[1, 2\] cannot feed '1-2'"
    ):
        simulate(plan, 10)


def test_2bw_whose_replicas_do_not_divide_the_microbatches_says_what_to_take() -> None:
    """At the published depths, [2, 2, 1]."""
    plan = plan_of(equal_layers(3, output_bytes=1), (2, 3, 1), depths=(2, 2, 1))
    plan = plan.model_copy(update={"schedule": TWO_BW, "microbatches": 3})
    with pytest.raises(PlanError, match=r"in_flight \[2, 2, 1\] cannot feed '2-3-1'") as caught:
        simulate(plan, 10)
    assert caught.value.hint.endswith("or take a multiple of 6 `microbatches`")


def test_what_cannot_be_simulated_is_refused() -> None:
    plan = plan_of(equal_layers(1), (1,))
    with pytest.raises(InputError, match="`minibatches` must be at least 1, got 0"):
        simulate(plan, 0)


def test_there_are_minibatches_enough_for_a_steady_state() -> None:
    for replicas in ((1, 1), (7, 1), (1,) * 8):
        plan = plan_of(equal_layers(len(replicas)), replicas)
        assert summarize(planner.simulate(plan)).steady
