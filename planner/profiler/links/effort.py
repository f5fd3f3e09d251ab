"""How much a measurement of links sends, so that it ends within a time that is known beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.formats.files import replace

MESSAGE_BYTES = 4_000_000
BUCKET_BYTES = 25_000_000  # the executor's largest bucket
BUDGET_S = 120.0

FIRST_ROUNDS = 3  # in which TCP comes up to speed
UNITS = 4  # layers of a small network with divided weights
SMALL_SUM_BYTES = 2**16
# of products before a small sum: one and four milliseconds, after which more hardly add to the wait
PRODUCT_PAIRS = 4, 12

# Of several measurements of a number the median counts: what another process does for some seconds
# disturbs one turn.
TURNS = 3

_LEAST_BYTES = 2**16
_LEAST_LATENCY_ROUNDS = 10
_UNIT_EXCHANGES = 4  # one where gradients are divided, three where weights are, too


@dataclass(frozen=True)
class Effort:
    """What is sent to measure one level in each turn.

    Args:
        message_bytes: of a message between two workers.
        bucket_bytes: of an all-reduce of gradients.
        sum_bytes: of the largest all-reduce between computations; what models exchange on CPUs.
        summed_bytes: of all-reduces in a row, with products between them: small ones are many,
            because what one of them takes varies most.
        unit_bytes: of the smallest unit with divided weights.
        latency_rounds: short messages from which a latency is the median.
        least_rounds: long messages of a pair.
        sum_rounds: of computations with and without all-reduces; what disturbs the one disturbs
            the other.
        unit_rounds: of units whose weights are whole and divided, after a first one.
        seconds: for the long messages of one set of pairs, and for the all-reduces of a level.
        turns: how often all of it is done.
    """

    message_bytes: int = MESSAGE_BYTES
    bucket_bytes: int = BUCKET_BYTES
    sum_bytes: int = 2**20
    summed_bytes: int = 2**22
    unit_bytes: int = 2**18
    latency_rounds: int = 100
    least_rounds: int = 8
    sum_rounds: int = 8
    unit_rounds: int = 4
    seconds: float = 1.0
    turns: int = 1

    @property
    def seconds_for_sizes(self) -> float:
        """Seconds of exchanges from which the bytes of the largest one follow."""
        return self.seconds * self.turns / 8

    def in_turns(self, turns: int) -> "Effort":
        """Return the effort of each turn where about as much is done in several."""
        return replace(
            self,
            latency_rounds=-(-self.latency_rounds // turns),
            least_rounds=-(-self.least_rounds // turns),
            sum_rounds=-(-self.sum_rounds // turns),
            unit_rounds=-(-self.unit_rounds // turns),
            seconds=self.seconds / turns,
            turns=turns,
        )

    def sums_in_a_row(self, size_bytes: int, reduced_bytes_per_s: float) -> int:
        """Return how many all-reduces of this size follow each other, with products between."""
        most_bytes = min(self.summed_bytes, self.seconds_for_sizes * reduced_bytes_per_s)
        return max(2, int(most_bytes / size_bytes))

    def scaled(self, share: float) -> "Effort":
        """Return the effort that takes about `share` of the time, but no less than says
        something.
        """

        def part(size_bytes: int) -> int:
            return min(size_bytes, max(_LEAST_BYTES, int(size_bytes * share)))

        rounds = int(self.latency_rounds * share)
        return replace(
            self,
            message_bytes=part(self.message_bytes),
            bucket_bytes=part(self.bucket_bytes),
            sum_bytes=part(self.sum_bytes),
            summed_bytes=part(self.summed_bytes),
            unit_bytes=part(self.unit_bytes),
            latency_rounds=min(self.latency_rounds, max(_LEAST_LATENCY_ROUNDS, rounds)),
            seconds=self.seconds * share,
        )


@dataclass(frozen=True)
class Pace:
    """How fast a level is, roughly, as a few messages and a small computation say.

    Args:
        size: members of a ring.
        turns: sets of pairs that are measured one after the other.
        s_per_byte: of a message, where all pairs of a set exchange at once.
        round_s: of a short exchange that all workers wait for.
        products_s: of a pair of products, between which there are sums.
        unit_s_per_byte: of a unit's computation by its weights; 0 where no units are measured.
        one_ring_size: workers in the one ring over all; 0 where that is no other measurement.
    """

    size: int
    turns: int
    s_per_byte: float
    round_s: float
    products_s: float = 0.0
    unit_s_per_byte: float = 0.0
    one_ring_size: int = 0

    def expected_s(self, effort: Effort) -> float:
        """Return the seconds that a turn takes with this effort."""
        return (
            self._messages_s(effort)
            + self._buckets_s(effort)
            + self._sums_s(effort)
            + self._units_s(effort)
        )

    def _messages_s(self, effort: Effort) -> float:
        """Return the seconds of short messages and long ones, which pairs exchange in turns."""
        message_s = effort.message_bytes * self.s_per_byte
        short_s = effort.latency_rounds * self.round_s
        long_s = max(effort.seconds, effort.least_rounds * message_s)
        return self.turns * (short_s + FIRST_ROUNDS * message_s + long_s)

    def _buckets_s(self, effort: Effort) -> float:
        """Return the seconds of all-reduces of gradients: two first, then as many as there is time
        for.
        """
        first_s = 2 * effort.bucket_bytes * self._reduced_s_per_byte(self.size)
        ring_s = effort.seconds + first_s
        if not self.one_ring_size:
            return ring_s

        first_s = 2 * effort.bucket_bytes * self._reduced_s_per_byte(self.one_ring_size)
        return ring_s + effort.seconds + first_s

    def _sums_s(self, effort: Effort) -> float:
        """Return the seconds of products with sums between them, and without."""
        reduced_s_per_byte = self._reduced_s_per_byte(self.size)
        small, large = SMALL_SUM_BYTES, max(2 * SMALL_SUM_BYTES, effort.sum_bytes)

        total_s = 0.0
        for size_bytes, pairs in (*((small, pairs) for pairs in PRODUCT_PAIRS), (large, 1)):
            rounds = effort.sums_in_a_row(size_bytes, 1 / reduced_s_per_byte)
            computed_s = 2 * pairs * self.products_s * size_bytes / small
            total_s += effort.sum_rounds * rounds * (size_bytes * reduced_s_per_byte + computed_s)

        return total_s

    def _units_s(self, effort: Effort) -> float:
        """Return the seconds of a small unit with divided weights, and of one of at least twice its
        size.
        """
        if not self.unit_s_per_byte:
            return 0.0
        reduced_s_per_byte = self._reduced_s_per_byte(self.size)
        most_bytes = min(effort.message_bytes // 2, effort.seconds_for_sizes / reduced_s_per_byte)
        unit_bytes = effort.unit_bytes + max(2 * effort.unit_bytes, most_bytes)

        # an exchange is half an all-reduce
        exchanges = (effort.unit_rounds + 1) * UNITS * _UNIT_EXCHANGES
        exchanged_s = exchanges * unit_bytes * reduced_s_per_byte / 2
        computed_s = (effort.unit_rounds + 1) * 3 * unit_bytes * self.unit_s_per_byte
        return exchanged_s + computed_s

    def _reduced_s_per_byte(self, members: int) -> float:
        """Return the seconds per byte of an all-reduce in a ring of so many."""
        return 2 * (members - 1) / members * self.s_per_byte


def fitting_effort(effort: Effort, paces: Sequence[Pace], budget_s: float) -> tuple[Effort, float]:
    """Return the largest effort up to `effort` with which all levels are measured in `budget_s`,
    and the seconds that it is expected to take.

    It is spent in `TURNS` turns where that fits. On slower links it is one turn, because the first
    messages of each take long, and what a link takes then hides what else is at work. The smallest
    effort may take longer than the budget.
    """
    in_turns = effort.in_turns(TURNS)
    expected_s = _all_s(in_turns, paces)
    if expected_s <= budget_s:
        return in_turns, expected_s

    # Latencies and computations do not shrink with the bytes, so one step may not be enough.
    share = 1.0
    fitting = effort
    expected_s = _all_s(fitting, paces)
    while expected_s > budget_s and share > 0.01:
        share *= max(0.5, budget_s / expected_s)
        fitting = effort.scaled(share)
        expected_s = _all_s(fitting, paces)

    return fitting, expected_s


def _all_s(effort: Effort, paces: Sequence[Pace]) -> float:
    """Return the seconds that all turns take on all levels."""
    return effort.turns * sum(pace.expected_s(effort) for pace in paces)
