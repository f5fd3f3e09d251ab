"""Tuned numbers of whole answers: shares of the time, and which differences count."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ClockTuning:
    """Of `planner.solver.clock`."""

    # How many times as long as it computes a part of a search may take, because the machine does
    # other work.
    max_wall_per_cpu_second: float = 3.0


@dataclass(frozen=True)
class AnswerTuning:
    """Of `planner.solver.solve`, `find_plan`, `answer` and `alternatives`."""

    # Shares of the time left: for the search, and then for the best synchronous plan. The rest is
    # for the usual ways.
    search_share: float = 0.9
    synchronous_share: float = 0.7

    # Share of the time left for each other schedule, where nothing fits under the one asked for.
    other_schedule_share: float = 0.5

    # Seconds that may be spent on a synchronous plan, however quick the search was.
    alternatives_s: float = 2.0

    # Instructions of the simulations for a table of usual ways: a second or two, and most tables
    # take a tenth of them. They are counted, so that a busy machine shows the same rows; and the
    # seconds at which one that is far too busy ends.
    table_instructions: int = 2**18
    table_s: float = 6.0

    # Seconds after the time limit, to simulate an answer that would not be otherwise. Without its
    # waiting nobody could compare it with others.
    last_simulation_s: float = 5.0

    # Share of the time by which no two plans are told apart: estimates are not that true.
    indistinguishable_share: float = 0.005

    # Share of a plan's interval of speeds that another plan's must cover for the two to be equal,
    # where both are estimated. Errors of two plans of one model have much in common, so that plans
    # are told apart by less than the width of an interval.
    equal_overlap: float = 0.8

    # Share of the estimated speed that a simpler plan may cost at most, however wide the interval:
    # most of an interval's width is common to all plans of a model.
    most_for_simplicity: float = 0.05

    # Share of the time that cuts inside blocks, or chunks, must save. What waits for their messages
    # is not all known.
    min_saving_share: float = 0.02

    # Cuts up to which a search looks inside blocks. It takes longer under synchronous schedules,
    # and where the memory is limited: then every stage may recompute any of its blocks.
    most_cuts: int = 400
    most_limited_cuts: int = 160

    # Numbers of equal stages in the table of usual ways, as users of Megatron choose them.
    usual_stages: tuple[int, ...] = (2, 4, 8)


@dataclass(frozen=True)
class FitTuning:
    """Of `planner.solver.fit` and `planner.solver.sizes`."""

    # Share of the time limit that may be computed. The rest is for other work on the machine:
    # beside as much of that, what is looked at is the same.
    computing_share: float = 0.75

    # Share of the time limit for what comes after the last search: its table, and files.
    ending_share: float = 0.1

    # Share of the time limit for the search, even where reading and estimating a model left less:
    # neither can be done in part, and without a search there is no answer.
    least_search_share: float = 0.25

    # Shares of the time left: for choosing sizes of microbatches, on which more depends than on any
    # search, since a size too small costs tens of times; then for the cluster that was asked about.
    # Other numbers of GPUs share the rest.
    sizing_share: float = 0.8
    solving_share: float = 0.6
    first_size_share: float = 0.6  # of what is left of it, for each size but the last

    # Where sequences may be divided: share of the same for whole ones, and of what is left then for
    # divided ones.
    whole_share: float = 0.5
    divided_share: float = 0.5
    # Seconds for the first number of ranks that may divide sequences, even where no time is left:
    # where long sequences do not fit whole, every other answer is far from it.
    least_divided_s: float = 5.0

    # Seconds for the number of GPUs that was asked about, even where no time is left: estimates of
    # a large model may take all of it on a busy machine, and then there would be no answer.
    least_answer_s: float = 5.0

    # Sizes of microbatches for which plans are sought.
    most_sizes: int = 2

    # By which share slower than the fastest size another one must look, on the line through two
    # others, not to be estimated.
    slower_size_share: float = 0.05

    # Share of the least time. A usual way that is so near to it leaves nothing to divide layers
    # for.
    balanced_share: float = 0.02

    # How many times as many GPUs as asked are tried where the model does not fit.
    most_gpus_ratio: int = 16

    # How many larger numbers of GPUs are tried, each twice the one before, where a training is to
    # be paid.
    larger_counts: int = 2

    # How many times as long as the number of GPUs before a number may take, whatever its part of
    # the time: where little fits, what does is sought until there is some. It was twice as long for
    # 128 H100 as for 256 of a model of 175 billion parameters.
    max_seconds_ratio: float = 2.0

    # How many times as long as the number of GPUs asked about the next one takes, as a first guess.
    next_seconds_ratio: float = 0.25


@dataclass(frozen=True)
class ExplanationTuning:
    """Of `planner.solver.problem.infeasible`, which says what would make a plan fit, and
    `planner.analysis.limits`.
    """

    memory_precision: float = 1e-4  # relative, of the smallest memory
    # Units of work of a plan that is simulated to say what limits it: a second or so, while
    # somebody waits for a table.
    most_units: int = 2**14

    most_gpus_ratio: int = 64  # how many times as many GPUs as there are, at most, are tried


@dataclass(frozen=True)
class LinksTuning:
    """Of `planner.analysis.slow_links`: how slow links may be that nobody measured."""

    # Shares of a data sheet's rate at which plans are compared, the slowest first. One ring over
    # servers of four Omni-Path ports reached a tenth of it (bigscience); what several at once
    # reach was not measured.
    shares: tuple[float, ...] = (0.2, 0.45)

    # How many times as fast another plan must be on the slow links for the choice to depend on
    # them.
    min_speedup: float = 1.05

    # Share of the time of an answer that is kept for this where a rate is a data sheet's.
    time_share: float = 0.25


@dataclass(frozen=True)
class WhatIfTuning:
    """Of `planner.analysis.explain` and `planner.analysis.fewer`: which other clusters are
    priced.
    """

    bandwidth_ratio: float = 1.1  # of links with more bandwidth
    memory_ratio: float = 1.5  # of GPUs with more memory
    most_lost_hosts: int = 64  # whose loss is priced, one by one, where there are more hosts


@dataclass(frozen=True)
class MeasuredTuning:
    """Of `planner.analysis.measured_cluster`: what of a run counts as planned."""

    same_speed: float = 0.05  # computations of equal devices differ by so much between two runs
    # The fastest of all workers, where the work is longer, and no device slower.
    all_slower: float = 0.9
    # How many times as slow as another one a worker may be because its layers became longer by
    # more; above that its device is slow. Attention grows with the square of a length.
    most_uneven_work: float = 1.6
    same_rate: float = 0.25  # messages, which wait for processors and for each other, by so much
    fewest: int = 5  # computations of a worker, or messages of a level, for a median

    # Share of the longest stage's time that a worker must compute, so that its device is measured:
    # differences of less than 5% of a minibatch are not told of.
    least_busy: float = 0.1

    # Of a search beside a run: processor seconds, and how many times as long it may take for them,
    # because workers may keep all cores busy most of the time.
    solving_s: float = 5.0
    max_wall_per_cpu_second: float = 4.0

    # Share by which a plan must be faster than the one that is run: predictions of two plans of one
    # model err by as much.
    same_pace: float = 0.05
