"""The collectives of replicated stages: who has joined a round, and who waits for its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Round:
    """One all-reduce or all-gather of a stage.

    Replicas join an all-gather after their update, and an all-reduce with the backward that completes their gradients,
    or, without a backward in the round, when they come to the all-reduce itself.
    """

    number: int
    joined: int = 0
    passed: int = 0
    backward_start_s: float = 0.0  # of the backward that ends last
    backward_s: float = 0.0  # its length
    arrived_s: float = 0.0  # the latest replica without a backward
    parts_left: int = 0
    carried: bool = False  # stays False if there are no gradients to send
    start_s: float | None = None
    end_s: float | None = None
    waiting: list[int] = field(default_factory=list)  # ranks

    def finish_part(self, start_s: float, end_s: float) -> bool:
        """Note that a part has been carried, and return whether it was the last one."""
        self.start_s = start_s if self.start_s is None else self.start_s
        self.carried = self.carried or end_s > start_s
        self.parts_left -= 1
        if self.parts_left == 0:
            self.end_s = end_s
        return self.parts_left == 0


class AllReduces:
    """The rounds in progress, by stage and number, and how many rounds each replica of a stage has joined."""

    def __init__(self, ranks: Sequence[Sequence[int]]) -> None:
        self.rounds: dict[tuple[int, int], Round] = {}
        self._replicas = [len(each) for each in ranks]
        self.joined = {(rank, stage): 0 for stage, each in enumerate(ranks) for rank in each}

    def join(self, rank: int, stage: int, start_s: float, backward_s: float, arrived_s: float = 0.0) -> Round | None:
        """Join the replica's next round; return the round if all replicas have joined it.

        Args:
            start_s, backward_s: start and length of its backward; 0 without one.
            arrived_s: when a replica without a backward came to the all-reduce.
        """
        number = self.joined[rank, stage]
        self.joined[rank, stage] += 1
        joined = self.rounds.setdefault((stage, number), Round(number))
        joined.joined += 1
        if start_s + backward_s >= joined.backward_start_s + joined.backward_s:
            joined.backward_start_s, joined.backward_s = start_s, backward_s
        joined.arrived_s = max(joined.arrived_s, arrived_s)
        return joined if joined.joined == self._replicas[stage] else None

    def leave(self, stage: int, number: int) -> None:
        """Note that a replica has passed the all-reduce; the last one closes the round."""
        left = self.rounds[stage, number]
        left.passed += 1
        if left.passed == self._replicas[stage]:
            del self.rounds[stage, number]
