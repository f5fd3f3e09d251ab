"""Tuned numbers of searches for plans that are priced by the cost model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ArrayTuning:
    """How large arrays are that a search computes at once."""

    batch_entries: int = 2**20  # over stages and GPUs
    batch_cuts: int = 1024  # ways to cut into chunks that are priced at once


@dataclass(frozen=True)
class BoundTuning:
    """Of `planner.solver.problem.drained`."""

    # Intervals of the limit X on the slowest stage. In each, the bound takes the better end of each
    # of its parts.
    drained_intervals: int = 64


@dataclass(frozen=True)
class ChainTuning:
    """Of the searches along the profile's order, where GPUs are alike."""

    # States up to which stages may choose which of their layers recompute: all stages have too many
    # choices.
    most_choosing_states: int = 300

    # At most so many states in the search for a start. Twice as many have such a search.
    rough_states: int = 300

    # Precision of searches over some of the cuts: less than timings vary.
    some_cuts_precision: float = 2e-3

    # The binary search. Where its bounds are this close, each walk should be cheap; the best time
    # may be below that of the start by `start_gap_share`, as a first guess; and it halves at most
    # so often between two questions for anything better.
    close_share: float = 0.02
    start_gap_share: float = 2e-3
    most_halvings: int = 4

    # How many times closer the bounds must be before the GPUs that each state may leave are counted
    # again: that costs a walk.
    tighten_ratio: float = 4.0

    # Numbers of replicas of a single stage that are tried for a start.
    single_stage_counts: int = 32

    # Numbers of replicas that are tried one by one where more may be slower. Beyond, more are taken
    # to be faster, as they are without latency.
    single_replica_counts: int = 64

    # On more GPUs than this, cuts are sought among some of more states only, and under synchronous
    # schedules not at all.
    many_gpus: int = 1024
    most_states_on_many_gpus: int = 1024


@dataclass(frozen=True)
class BranchesTuning:
    """Of `planner.solver.problem.cut_space` and `planner.solver.improve.branches`: graphs with
    branches.
    """

    # Sets of layers that a cut may leave before it, up to which all are searched: about as many as
    # there are layers in the largest models, so that a search, which takes their square, takes no
    # longer than for those. Where stages may choose what recomputes, all choices are known for half
    # as many states.
    most_downsets: int = 600
    most_choosing_downsets: int = 300

    # States of each round of improvement, likewise.
    near_states: int = 400
    near_choosing_states: int = 300

    # Rounds end before, almost always: a plan that they improve is improved two or three times. A
    # round must gain this share of the time to be worth another one.
    rounds: int = 12
    min_gain_share: float = 3e-4

    most_proposed: int = 3  # improved plans, the fastest first


@dataclass(frozen=True)
class SynchronousTuning:
    """Of `planner.solver.search.chain.synchronous`, and of who asks it."""

    most_states: int = 600  # on many GPUs, or for alternatives: it is slower than the other search

    # On more GPUs, where tables would have more entries, GPUs are counted in units. What is found
    # then is as precise as this.
    most_single_gpus: int = 1024
    most_entries: int = 2**23
    unit_precision: float = 1e-2

    # Entries, about, of tables that are kept for other searches over a space.
    most_kept_entries: int = 2**23

    # How many times a limit the next one is, on the way to a plan that is balanced well.
    limit_ratio: float = 1.25


@dataclass(frozen=True)
class InterleavedTuning:
    """Of `planner.solver.search.chain.interleaved`."""

    most_states: int = 192  # with more, cuts at some of them only: tables grow with their square
    most_tried: int = 20_000  # ways to cut for one number of workers; with more, cuts move
    most_exhaustive_gpus: int = 16  # up to which every number of workers and copies is tried
    moves: tuple[int, ...] = (1, -1, 2, -2, 5, -5)  # of a cut, in states


@dataclass(frozen=True)
class LevelsTuning:
    """Of the search on clusters of several levels, but for plans in columns."""

    # GPUs up to which every place is tried.
    most_placed_gpus: int = 256

    # Entries of the tables of stages' bounds; more cuts than fit are sampled, in so many rounds.
    most_entries: int = 12_000_000
    rounds: int = 3

    # Numbers of GPUs that are tried one by one where memory is limited.
    most_gpu_counts: int = 16

    # Answers that trade the sum against the maximum.
    most_trades: int = 16

    # Plans that local search prices for up to `few_gpus`, and where it need not be precise. For
    # more GPUs, fewer plans.
    most_priced: int = 3_000
    most_priced_roughly: int = 1_000
    few_gpus: int = 16

    # Shares of a stage's compute at which local search splits it.
    split_shares: tuple[float, ...] = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4)

    # Share of its time by which local search prefers a plan whose stages are even. Where several
    # resources are equally busy, no single step lowers the time; evening out does.
    uneven_share: float = 1e-3

    # States, about, over which plans for links that are all alike are sought; and the precision of
    # the bound over more than twice as many.
    most_alike_states: int = 300
    bound_precision: float = 4e-3


@dataclass(frozen=True)
class ColumnsTuning:
    """Of `planner.solver.search.levels.columns`."""

    # GPUs and states up to which columns are searched. Beyond, those of good plans are priced, and
    # the bound for consecutive ranks is the nearest flat cluster's, too.
    most_gpus: int = 64
    most_states: int = 600

    # GPUs up to which every number of columns is tried.
    most_exhaustive_gpus: int = 16

    most_priced: int = 300  # while cuts move, for as many GPUs; for more GPUs, fewer
    most_proposed: int = 4

    # Precision of the flat searches: their plans are candidates, and their times bounds.
    precision: float = 1e-3


@dataclass(frozen=True)
class RestrictedTuning:
    """Of `planner.solver.propose.waiting`: plans of simple kinds, which may wait less."""

    # Every number of GPUs up to `most_dense_gpus` is tried: larger pipelines take longer to
    # simulate. Above, so many are tried from the cluster's number down, and some below.
    most_dense_gpus: int = 16
    nearest_counts: int = 4

    # Alternatives for slower links: the factor between them, how many, and for how many GPUs.
    slower_link_ratio: float = 2**0.5
    slower_links: int = 2
    slower_link_gpus: int = 8


@dataclass(frozen=True)
class WaitingTuning:
    """Of `planner.solver.propose.waiting`: alternatives to the best plan by the cost model."""

    # How many times slower links are in the alternatives of synchronous schedules.
    synchronous_link_ratios: tuple[float, ...] = (1.0, 2.0)

    # Alternatives for faster links, on clusters of several levels: the factor between them, and how
    # many. They made plans for ResNet-50 on 4x4 up to 17% faster.
    faster_link_ratio: float = 2.0
    faster_links: int = 4

    # How many times the best plan's seconds a plan's bound may be on a slower link, to be proposed.
    slower_link_seconds_ratio: float = 1.15


@dataclass(frozen=True)
class MixedTuning:
    """Of `planner.solver.propose.mixed`: GPUs of several kinds."""

    most_kinds: int = 4  # whose orders are tried

    # With more states, or more entries of states² · GPUs, cuts at some of them only.
    most_states: int = 160
    most_entries: int = 4_000_000

    # Steps of the limit on the maximum, relative: over all of them, and around the best.
    coarse_step: float = 0.05
    fine_step: float = 0.004

    # How many times slower links are in alternatives: where messages weigh more, plans have fewer.
    slower_link_ratios: tuple[float, ...] = (2.0, 4.0)

    # How many times the best seconds of an asynchronous plan, within which others are proposed.
    slower_plan_ratios: tuple[float, ...] = (1.02, 1.05, 1.1, 1.2)


@dataclass(frozen=True)
class ProposeTuning:
    """Of the other proposers."""

    # Stages of the regular plans that use all GPUs, in all: thousands of GPUs would have hundreds
    # of pipelines.
    most_regular_stages: int = 2**12

    # Regular interleaved plans: chunks on a worker, and plans that are simulated.
    most_chunks: int = 16
    most_interleaved_simulated: int = 3

    # Plans whose stages with copies of a weight have equally many replicas: the precision of their
    # seconds, and tries of one search, each with less memory.
    even_precision: float = 1e-4
    most_even_tries: int = 4

    # Columns, about, of an integer program that is tried beside a search.
    most_program_columns: int = 40_000

    # Cuts at which any plan that fits is sought, when time is over.
    most_any_plan_cuts: int = 100


@dataclass(frozen=True)
class IntegerTuning:
    """Of `planner.solver.search.integer`."""

    # Larger programs are refused.
    most_columns: int = 200_000
    most_arcs: int = 300_000

    # Seconds that CBC has at least, and between two looks at whether it is to stop.
    least_limit_s: float = 0.1
    poll_s: float = 0.1
