"""The executor on devices that work beside their hosts, in every order that its streams and events
allow.

Each run compares what the devices have with what the hosts' order of calls gives, to the bit. Then
one wait after another is taken away, and must be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from unittest.mock import patch

import pytest
from torch import Tensor

from planner.executor.communication import nccl_links
from planner.executor.communication.later import MOST
from planner.executor.run.plan_part import PlanPart
from planner.workers.groups import MESSAGE_BLOCKS
from tests.executor.device import mutations, real
from tests.executor.device.cases import runs
from tests.executor.device.findings import finding
from tests.executor.device.rules import Post
from tests.executor.device.runs import Run, carry_out
from tests.executor.device.simulated import Devices
from tests.executor.device.world import World

SHAPES = runs()
REAL = [run for run in real.runs() if not run.degrees]
# whose ranks divide layers, with PyTorch's DTensor
DIVIDING = [run for run in real.runs() if run.degrees]
# a device that does nothing before it must, and five that do some of it before
SEEDS = (None, 1, 2, 3, 4, 5)
SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


def drawn(shapes: list[Run]) -> list[tuple[Run, int]]:
    """Give each shape a seed of its own."""
    return [(run, index) for index, run in enumerate(shapes)]


@pytest.mark.parametrize(
    "cases",
    [
        drawn(list(SHAPES[::40])),
        pytest.param([(run, seed) for run in SHAPES for seed in (1, 2, 3)], marks=SLOW),
    ],
    ids=["some", "all"],
)
def test_no_order_of_a_device_changes_what_is_computed(cases: list[tuple[Run, int]]) -> None:
    found = {(str(run), seed): finding(run, seed) for run, seed in cases}
    assert not {case: what for case, what in found.items() if what}
    assert len(cases) >= 10


@pytest.mark.parametrize(
    "cases",
    [
        drawn(REAL[::10] + DIVIDING[::24]),
        pytest.param([(run, seed) for run in REAL + DIVIDING for seed in SEEDS[:3]], marks=SLOW),
    ],
    ids=["some", "all"],
)
def test_with_layers_of_a_model_and_its_optimizer(cases: list[tuple[Run, int | None]]) -> None:
    found = {(str(run), seed): finding(run, seed, real.make_real_context) for run, seed in cases}
    assert not {case: what for case, what in found.items() if what}
    assert len(cases) > 4


def test_the_order_of_a_device_does_differ() -> None:
    """Two seeds do the work in two orders, with the same weights to the bit."""
    run = Run("1f1b", (2, 1), minibatches=6)
    first, second = (carry_out(run, seed) for seed in (1, 2))
    assert first.devices.history != second.devices.history
    assert first.results.keys() == second.results.keys()
    assert all(value.equal(second.results[key]) for key, value in first.results.items())


def test_the_hosts_lead_does_not_decide_how_much_memory_messages_take() -> None:
    """The middle stage receives two messages per minibatch; its device does nothing before
    it must.
    """
    with patch.object(Devices, "RECORDS", True):
        few, many = (blocks_of_messages(minibatches) for minibatches in (20, 100))
        assert many <= few + 1
        with patch.object(nccl_links, "LEAD", MOST):
            assert blocks_of_messages(100) > 2 * many


def blocks_of_messages(minibatches: int) -> int:
    return carry_out(Run("1f1b", (1, 1, 1), minibatches=minibatches)).devices.made_blocks[1]


def test_a_loop_of_ones_own_is_not_held_up_by_the_newest_losses() -> None:
    """Its worker is told minibatch after minibatch how far it may go; the device does nothing
    before it must.
    """

    def steps(unread: int) -> list[int]:
        known = []

        def each_by_itself(part: PlanPart, *_: object) -> int:
            loop = part.loop
            for count in range(1, 13):
                loop.run_allowed(count, unread)
                known.append(len(loop.worker.log.losses))
            loop.drain(12)
            loop.worker.drain()
            return 12

        with patch.object(PlanPart, "train", each_by_itself):
            carry_out(Run("1f1b", (1,), minibatches=12))
        return known

    assert steps(0) == list(range(1, 13))
    assert steps(3) == [0, 0, 0, *range(1, 10)]


def test_a_worker_with_more_groups_than_streams_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    carry_out(Run("1f1b", (14, 1), minibatches=1))
    assert not caplog.records
    carry_out(Run("1f1b", (15, 1), minibatches=1))
    assert ["rank 15 has 30 groups" in record.message for record in caplog.records] == [True]


def test_groups_of_messages_take_few_thread_blocks() -> None:
    """A receive that waits holds them."""
    world = carry_out(Run("1f1b", (2, 1)))
    of_messages = [
        group for group in world.groups if group.backend == "nccl" and None not in group.options
    ]
    assert {group.options[0].config.max_ctas for group in of_messages} == {MESSAGE_BLOCKS}
    used = {
        post.communicator.split(" of ")[0]: post.kind
        for operations in world.recording.values()
        for post in operations
        if isinstance(post, Post)
    }
    assert {group.name for group in of_messages} == {
        name for name, kind in used.items() if kind != "all"
    }


# Where each fault shows: straight pipelines, replicas, divided optimizers.
ANY = (Run("1f1b-flush", (1, 1, 1), 4), Run("1f1b", (1, 2)), Run("2bw", (1, 1), 4))
REPLICAS = (Run("1f1b", (2, 1)), Run("1f1b-flush", (2, 2), 4), Run("1f1b-flush", (2,), 4))
DIVIDED = (Run("1f1b-flush", (2, 2), 4, sharded=True), Run("1f1b", (2, 1), sharded=True))
EVALUATED = (
    Run("1f1b-flush", (1, 1), 4, evaluate_every=2),
    Run("1f1b", (1, 1, 1), evaluate_every=2),
)
TIED = (Run("1f1b-flush", (1, 1, 1), 4, tied=((0, 2), (1, 2))), Run("1f1b", (1, 1), tied=((0, 1),)))
FRESH = (*TIED, Run("1f1b", (2, 1)))  # many messages into memory of the side stream
MUTATIONS = [
    (mutations.read_before_wait, ANY),
    (mutations.no_wait_for_a_free_buffer, ANY),
    (mutations.no_record_stream, FRESH),
    (mutations.spare_buffer_without_its_event, ANY),
    (mutations.send_buffer_refilled_before_its_send, EVALUATED),
    (mutations.send_buffer_refilled_at_once, ANY),
    (mutations.all_reduce_not_waited_for, REPLICAS),
    (mutations.weights_of_replicas_not_waited_for, DIVIDED),
    (mutations.host_reads_before_its_copy, ANY),
    (mutations.first_uses_in_another_order, ANY),
    (mutations.loss_read_every_microbatch, ANY),
    (mutations.allocation_between_posts, ANY),
    (mutations.one_communicator_for_both_directions, ANY),
    (mutations.receive_waits_for_all_compute, ANY),
    (mutations.no_device_wait_at_first_use, ANY),
    (mutations.header_never_checked, ANY),
    (mutations.memory_taken_when_needed, ANY),
    (mutations.pinned_memory_taken_when_needed, ANY),
    (mutations.posting_ahead, ANY),
    (mutations.no_first_uses, TIED),
]


@cache
def clean(run: Run, seed: int | None) -> str | None:
    """What is found without a fault; many faults have the same shapes."""
    return finding(run, seed)


@cache
def expected_of(run: Run) -> Mapping[tuple[int, str], Tensor]:
    return carry_out(run).results


def hits(
    fault: Callable[[], AbstractContextManager[None]], shapes: tuple[Run, ...]
) -> Iterator[str]:
    """Yield what is found with a fault, of these shapes and all seeds."""
    for run in shapes:
        expected = expected_of(run)
        for seed in SEEDS:
            with fault():
                found = finding(run, seed, expected=expected)
            if found:
                yield found


@pytest.mark.parametrize(
    ("fault", "shapes"), MUTATIONS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_missing_wait_is_found(
    fault: Callable[[], AbstractContextManager[None]], shapes: tuple[Run, ...]
) -> None:
    assert not [what for run in shapes[:1] for seed in SEEDS[:3] if (what := clean(run, seed))]
    assert next(hits(fault, shapes), None)


def test_a_sum_of_a_group_that_nobody_waits_for_is_found() -> None:
    with patch.object(World, "_awaited", lambda _, value: value):
        assert finding(DIVIDING[0], 1, real.make_real_context)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_table_of_faults(record_property: Callable[[str, object], None]) -> None:
    """The table in docs/explanation/executor.md: in how many runs of each fault's shapes it is
    found.
    """
    for fault, shapes in MUTATIONS:
        found = len(list(hits(fault, shapes)))
        record_property(fault.__name__, f"{found} of {len(shapes) * len(SEEDS)}")
        assert found
