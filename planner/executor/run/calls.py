"""What each rank's script asks of a pipeline: all ranks must make the same calls, with the same
batches.

Before a call does anything, it announces itself: one all-reduce gives each rank a table with a row
per rank,

    call, minibatches before it, samples, digest of its batches.

Rows that differ are an error on all ranks, which says who differs. So loaders that shuffle
differently, a sampler that gives each rank a part, and loaders of different length are noticed
before anything waits for a message that does not come or has another size. Messages of gloo that
have another size than expected would end the process.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import InputError
from planner.executor.communication.control import share
from planner.model.batch_digest import digest_of_all
from planner.workers.heartbeat import Heartbeat

_SAME_BATCHES = (
    "hand in the same samples in the same order on all ranks: without a DistributedSampler, and a "
    "DataLoader that "
    "shuffles needs a generator of its own with the same seed on all of them; random "
    "augmentations need one, too"
)
_SAME_CALLS = "make the same calls of the pipeline in the same order on all ranks"
_SAME_LENGTHS = (
    "give all ranks loaders of one length over the same samples, without a DistributedSampler, "
    "and leave the loop on "
    "all of them after the same minibatch"
)


class Call(IntEnum):
    """What a script asks of a pipeline."""

    STEP = 1
    DRAIN = 2
    EVALUATE = 3
    SAVE_CHECKPOINT = 4
    LOAD_CHECKPOINT = 5
    SAVE_WEIGHTS = 6
    END = 7  # of the `with` statement

    @property
    def title(self) -> str:
        return f"{self.name.lower()}()"


@dataclass(frozen=True)
class Row:
    """What one rank announces."""

    call: Call
    minibatches: int  # handed in before
    samples: int = 0
    digest: int = 0


@dataclass(frozen=True)
class _Announced:
    row: Row
    digests: Sequence[int]  # of each batch
    table: Tensor  # of all ranks, when the work is done
    work: dist.Work


class SharedCalls:
    """Compares the calls of all ranks, which announce each in the same order.

    Args:
        group: of all ranks, over gloo, which nothing but these calls and their losses uses.
    """

    def __init__(self, group: dist.ProcessGroup, heartbeat: Heartbeat) -> None:
        self._group = group
        self._heartbeat = heartbeat
        self._pending: deque[_Announced] = deque()

    def announce(
        self, call: Call, minibatches: int, samples: int = 0, digests: Sequence[int] = ()
    ) -> None:
        """Tell the others about a call, and wait for none of them."""
        row = Row(call, minibatches, samples, digest_of_all(digests))
        table = torch.zeros(dist.get_world_size(), 4, dtype=torch.int64)
        table[dist.get_rank()] = torch.tensor([row.call, row.minibatches, row.samples, row.digest])
        work = dist.all_reduce(table, group=self._group, async_op=True)
        assert work is not None
        self._pending.append(_Announced(row, digests, table, work))

    def agree(
        self, call: Call, minibatches: int, samples: int = 0, digests: Sequence[int] = ()
    ) -> None:
        """Tell the others about a call, wait for theirs, and raise InputError where they differ."""
        self.announce(call, minibatches, samples, digests)
        self.compare()

    def compare(self, minibatches: int | None = None) -> None:
        """Wait for all ranks' calls up to the first `minibatches`, or all; raise InputError where
        they differ.
        """
        while self._pending and (
            minibatches is None or self._pending[0].row.minibatches < minibatches
        ):
            announced = self._pending.popleft()
            if not announced.work.is_completed():
                what = (
                    f"waiting for the other ranks' {announced.row.call.title}, after "
                    f"{_counted(announced.row)}"
                )
                self._heartbeat.enter(what, meeting=True)
            announced.work.wait()
            rows = [Row(Call(call), *rest) for call, *rest in announced.table.tolist()]
            if len(set(rows)) > 1:
                raise self._difference(rows, announced.digests)

    def _difference(self, rows: Sequence[Row], digests: Sequence[int]) -> InputError:
        calls = {row.call for row in rows}
        if Call.END in calls and len(calls) > 1:
            return _ended_early(rows)
        if len(calls) > 1 or len({row.minibatches for row in rows}) > 1:
            return _other_calls(rows)
        if calls == {Call.EVALUATE}:
            # All ranks are here, and have the same table.
            texts = share(json.dumps(list(digests)), self._group)
            return _other_evaluation(rows, [json.loads(text) for text in texts])

        return _other_minibatch(rows)


def _ended_early(rows: Sequence[Row]) -> InputError:
    ended = [rank for rank, row in enumerate(rows) if row.call is Call.END]
    others = [rank for rank, row in enumerate(rows) if row.call is not Call.END]
    next_call = rows[others[0]].call
    goes_on = "another minibatch comes"
    if next_call is not Call.STEP:
        goes_on = f"{next_call.title} is called"
    return InputError(
        f"{ranks_in_words(ended)} ended the loop after {_counted(rows[ended[0]])}, and on "
        f"{ranks_in_words(others)} "
        f"{goes_on}" + (": loaders of different length" if next_call is Call.STEP else ""),
        hint=_SAME_LENGTHS if next_call is Call.STEP else _SAME_CALLS,
    )


def _other_calls(rows: Sequence[Row]) -> InputError:
    different = next(
        rank for rank, row in enumerate(rows) if row != rows[0] and not _same_call(row, rows[0])
    )
    alike = [rank for rank, row in enumerate(rows) if _same_call(row, rows[different])]
    texts = [f"{rows[rank].call.title} after {_counted(rows[rank])}" for rank in (different, 0)]
    return InputError(
        f"the calls of the pipeline differ: {texts[0]} on {ranks_in_words(alike)}, and {texts[1]} "
        f"on rank 0",
        hint=_SAME_CALLS,
    )


def _same_call(row: Row, other: Row) -> bool:
    return (row.call, row.minibatches) == (other.call, other.minibatches)


def _other_minibatch(rows: Sequence[Row]) -> InputError:
    others = [rank for rank, row in enumerate(rows) if row != rows[0]]
    what = f"minibatch {rows[0].minibatches} is not the same on all ranks"
    return InputError(f"{what}: {_samples_differ(rows, others)}", hint=_SAME_BATCHES)


def _other_evaluation(rows: Sequence[Row], digests: Sequence[Sequence[int]]) -> InputError:
    lengths = [len(each) for each in digests]
    for batch, found in enumerate(zip(*digests, strict=False)):
        others = [rank for rank, digest in enumerate(found) if digest != found[0]]
        if others:
            what = (
                f"batch {batch} of the evaluation after {_counted(rows[0])} is not the same "
                f"on all ranks"
            )
            return InputError(f"{what}: {_given_others(others)}", hint=_SAME_BATCHES)

    others = [rank for rank, length in enumerate(lengths) if length != lengths[0]]
    return InputError(
        f"evaluate() was given {lengths[others[0]]} batches on {ranks_in_words(others)}, and "
        f"{lengths[0]} on rank 0",
        hint=_SAME_LENGTHS,
    )


def _samples_differ(rows: Sequence[Row], others: Sequence[int]) -> str:
    sizes = {rows[rank].samples for rank in others}
    if sizes == {rows[0].samples}:
        return _given_others(others)
    texts = " or ".join(map(str, sorted(sizes)))
    return f"it has {texts} samples on {ranks_in_words(others)}, and {rows[0].samples} on rank 0"


def _given_others(others: Sequence[int]) -> str:
    return f"{ranks_in_words(others)} got other samples than rank 0, or in another order"


def _counted(row: Row) -> str:
    return f"{row.minibatches} minibatch" + ("es" if row.minibatches != 1 else "")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 1 and 3", or "ranks 1, 2, 3 and 4 others" for many."""
    shown = 8
    names = [str(rank) for rank in ranks[:shown]]
    if len(ranks) > shown:
        names.append(f"{len(ranks) - shown} others")
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
