"""Ranks that divide the sequences of every microbatch between them (context parallelism).

Each of c ranks has a c-th of the tokens of each sequence, and all weights. Attention alone looks at
other tokens: there the ranks pass keys and values on (Liu et al., "Ring Attention", 2023; Llama 3,
2024, section 3.3.2). They divide the first and the last tokens alike, so that a causal mask leaves
all of them the same work.

A replica of a stage is then a group of c ranks, or of c times as many as divide its layers. All
stages of a plan have the same c. What it costs is in `planner.cost.context`, the groups are those
of `planner.stages.tensor`, and how it is exported is in `planner.exports`. `plan train` exchanges
tokens for heads about attention, in place of the ring (`planner.model.context`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

# Ranks that are tried inside a server where nobody says, for sequences of so many tokens.
USUAL_CONTEXT = (2, 4, 8)
LONG_TOKENS = 16_384


class DividedSequences:
    """The questions that others ask a plan about the sequences of its microbatches."""

    if TYPE_CHECKING:  # pydantic would take this for a field

        @property
        def context(self) -> int | None: ...

    @property
    def context_ranks(self) -> int:
        """Ranks between which a sequence is divided; 1 where it is whole."""
        return self.context or 1

    @property
    def divides_sequences(self) -> bool:
        return self.context_ranks > 1

    @property
    def context_words(self) -> str:
        """Say what groups of ranks do; empty where each rank has whole sequences."""
        if not self.divides_sequences:
            return ""
        return f"context parallelism of {self.context_ranks} ranks"


def usual_context(tokens: float | None, per_server: int) -> Sequence[int]:
    """Return the numbers of ranks that are worth a try for samples of so many tokens, beside 1."""
    if tokens is None or tokens < LONG_TOKENS:
        return ()
    return tuple(ranks for ranks in USUAL_CONTEXT if per_server % ranks == 0)
