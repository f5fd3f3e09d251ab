"""In the steady state the host reads nothing that a device computes: on a GPU each read would wait
for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.speed.overhead.cases import MODEL, WORKERS, Case, plan_of
from benchmarks.speed.overhead.stand_in import build, lone_rank
from planner.executor.communication.gradients import GradientAverager, WholeBucket, chunks
from planner.executor.communication.later import Reader
from planner.executor.communication.sharding import Sharding
from planner.executor.run.worker import Observers, PipelineWorker
from planner.executor.stage.optimizer import StageOptimizer
from planner.model.spec import TrainingSpec
from planner.schedule.instructions import Unit
from planner.workers.failures import LossNotFiniteError
from planner.workers.heartbeat import Heartbeat
from planner.workers.place import CPU, Place

SPEC = TrainingSpec.from_file(MODEL)


class Held:
    """A `Later` whose device is never there before the end."""

    def __init__(self) -> None:
        self.held: list[tuple[Tensor, Reader]] = []

    def read(self, value: Tensor, reader: Reader) -> None:
        self.held.append((value.clone(), reader))

    def poll(self) -> None:
        pass

    def flush(self, keep: int = 0) -> None:
        while len(self.held) > keep:
            value, reader = self.held.pop(0)
            reader(value)


class _Methods(TorchFunctionMode):
    """Counts methods that copy a tensor to the host; most of them are no operation that a
    dispatcher sees.
    """

    READS = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.item)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.READS
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Counts operations whose result is a number of the host's: those behind `float`, `bool`,
    `item` and `equal`.
    """

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.READS
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the host's reads inside."""
    with _Methods() as methods, _Operations() as operations:
        yield lambda: methods.count + operations.count


class NcclOnCpu(Place):
    """A place whose messages are posted as over NCCL, on the CPU."""

    @property
    def backend(self) -> Any:
        return "nccl"


def test_reads_are_counted() -> None:
    for read in (
        float,
        bool,
        Tensor.item,
        Tensor.tolist,
        lambda t: t.cpu(),
        lambda t: torch.equal(t, t),
    ):
        with counted() as reads:
            read(torch.ones(()))
        assert reads() > 0, read


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "place", [CPU, NcclOnCpu(CPU.compute, CPU.wire)], ids=["posted ahead", "posted in runs"]
)
@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b-flush", 4, 0),
        Case("1f1b-flush", 4, 1),
        Case("1f1b-flush", 4, 2),
        Case("1f1b", 1, 2),
        Case("zb-h1", 4, 1),
    ],
    ids=lambda case: case.name,
)
def test_a_worker_reads_nothing_until_its_stream_ends(
    case: Case, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It looks at labels that the host has read, before they go to a device.
    monkeypatch.setattr("planner.executor.run.data.check_labels", lambda *_: None)
    with lone_rank(case.stage, WORKERS):
        _, worker, neighbours, stream = build(plan_of(case), SPEC, 12, place)
        later = Held()
        with neighbours.reached():
            worker.run(islice(stream, 40))  # first messages are checked at once
            for owner, name in ((worker, "_later"), (worker, "_checks"), (worker.links, "_later")):
                if hasattr(owner, name):
                    setattr(owner, name, later)
            before = len(worker.log.losses)
            with counted() as reads:
                worker.run(stream, unread=1000)
            assert reads() == 0
            assert len(worker.log.losses) == before
            later.flush()
    losses = [loss for _, loss in worker.log.losses]
    assert len(losses) == (12 * case.microbatches if case.stage == WORKERS - 1 else 0)
    assert all(map(math.isfinite, losses))


def test_a_nan_is_told_with_its_minibatch_when_later_losses_have_come() -> None:
    observers = Observers(Heartbeat())
    worker = PipelineWorker(
        {},
        None,  # type: ignore[arg-type]
        observers,
        CPU.compute,
        stop_on_nan=True,
    )
    later = Held()
    worker._later = later  # type: ignore[assignment]
    for minibatch, loss in enumerate([1.0, 0.5, math.nan, 0.2]):
        worker._log_loss(Unit(minibatch), torch.tensor(loss))
    with pytest.raises(LossNotFiniteError, match="the loss of minibatch 2 is nan"):
        later.flush()
    assert worker.log.losses == [(0, 1.0), (1, 0.5)]


def test_the_norm_to_clip_by_stays_on_the_device() -> None:
    module = nn.Linear(4, 4)
    optimizer = StageOptimizer(SPEC, module, clip_grad_norm=0.5)
    torch.autograd.backward(module(torch.ones(2, 4)).sum())
    before = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    with counted() as reads:
        optimizer.step(None)
    assert reads() == 0
    after = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    assert torch.allclose(after, before * (0.5 / before.norm()))


def test_an_overflow_in_what_was_sent_is_read_once_per_update() -> None:
    optimizer = StageOptimizer(SPEC, nn.Identity(), scale_loss=True)
    for value, finite in ((1.0, True), (math.inf, False), (2.0, True)):
        with counted() as reads:
            for _ in range(8):
                optimizer.note_sent([torch.ones(3), torch.tensor([1.0, value])])
            assert reads() == 0
            skipped = optimizer.skipped
            optimizer.step(None)
            assert reads() == 1
        assert (optimizer.skipped == skipped) is finite


def test_averaging_reads_which_gradients_there_are_only_where_one_is_missing() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    with lone_rank(0, 2):
        averager = GradientAverager(
            [WholeBucket(chunk) for chunk in chunks(weights)], dist.new_group([0, 1])
        )
        for used, expected in ((4, 0), (3, 1)):
            for weight in weights:
                weight.grad = None
            with counted() as reads:
                averager.begin()
                torch.autograd.backward(
                    torch.stack([weight.sum() for weight in weights[:used]]).sum()
                )
                averager.finish(2)
            assert reads() == expected
            for weight in weights[:used]:
                assert torch.equal(weight.grad, torch.full((3,), 0.5))  # type: ignore[arg-type]
            assert all(weight.grad is None for weight in weights[used:])


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_divided_update_reads_nothing(clip: float | None) -> None:
    """Sums, norm, step and exchange of the weights; and which gradients there are, only where one
    is missing.
    """
    module = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    with lone_rank(0, 2):
        group = dist.new_group([0, 1])
        sharding = Sharding(list(module.parameters()), (0, 2), (), torch.device("cpu"))
        optimizer = StageOptimizer(SPEC, module, clip_grad_norm=clip, sharding=sharding)
        notes: list[tuple[str, bool]] = []
        sharding.connect(group)
        sharding.note = lambda activity, waits: notes.append((activity, waits))
        averager = GradientAverager(sharding.buckets, group)
        for used, expected in ((module, 0), (module[:1], 1)):
            with counted() as reads:
                averager.begin()
                torch.autograd.backward(used(torch.ones(1, 40)).sum())
                averager.finish(2)
                optimizer.step(None)
                optimizer.forget_gradients()
            assert reads() == expected
        # Whoever waits for replicas is not to blame for a hang, and then works on.
        assert ("waiting for its replicas' weights", True) in notes
        assert not notes[-1][1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: nothing to wait for")
@pytest.mark.parametrize("stage", range(WORKERS))
def test_no_instruction_synchronises_a_gpu(stage: int) -> None:
    device = torch.device("cuda", 0)
    case = Case("1f1b-flush", 4, stage)
    with lone_rank(stage, WORKERS):
        _, worker, neighbours, stream = build(plan_of(case), SPEC, 12, Place(device, device))
        with neighbours.reached():
            worker.run(islice(stream, 100))
            try:
                for instruction in islice(stream, 100):
                    torch.cuda.set_sync_debug_mode("error")
                    worker._execute(instruction)
                    torch.cuda.set_sync_debug_mode("default")
            finally:
                torch.cuda.set_sync_debug_mode("default")
            worker.run(stream)
