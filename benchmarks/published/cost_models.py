"""PipeDream's published cost models, to compare with: those of its optimizer and of its paper. Both
charge for cuts.

Our search takes any model of a stage, so it finds the published optimizer's answers, on devices
that are all alike and have links of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Link
from planner.cost.network.topology import Busy
from planner.cost.work import Floats, Integers, Work
from planner.formats.profile import Profile
from planner.options.solving import StageRules
from planner.solver.improve.branches import improved_cuts
from planner.solver.problem.downsets import Downsets
from planner.solver.problem.layer_graph import LayerGraph
from planner.solver.problem.problem import Limits
from planner.solver.problem.replica_models import ReplicaModel, larger_root
from planner.solver.problem.result import CutPath
from planner.solver.problem.states import Chain, CutSpace
from planner.solver.search.chain.search import Search
from planner.solver.tuning.record import STANDARD


@dataclass(frozen=True)
class CutWork(Work):
    """The work of stages, with the bytes of all values that are live at the cuts around them."""

    cut_before_bytes: Floats = field(default_factory=lambda: np.asarray(0.0))
    # 0 for the first stage: see below
    cut_after_bytes: Floats = field(default_factory=lambda: np.asarray(0.0))


class KnowsCuts(CutSpace):
    """A space of cuts whose stages know what is live at their ends."""

    def work(self, state: int, others: Integers) -> CutWork:
        """Return the work of the stages from the state to each of `others`."""
        plain, live = super().work(state, others), self._fronts[0]
        return CutWork(
            **{each.name: getattr(plain, each.name) for each in fields(plain)},
            cut_before_bytes=np.asarray(live[state]),
            # The optimizer leaves out what the first stage sends.
            cut_after_bytes=live[others] if state else np.zeros(len(others)),
        )


class CutChain(KnowsCuts, Chain):
    """The cuts along a profile's order."""

    def only(self, states: Integers) -> CutChain:
        """Return the space of these states, which must include both ends."""
        return CutChain(self.layer_costs, self._states[states])


class CutDownsets(KnowsCuts, Downsets):
    """Other cuts of a profile, too."""

    def only(self, states: Integers) -> CutDownsets:
        """Return the space of these states, which must include both ends."""
        return CutDownsets(self.layer_costs, self._inside[states])


class PaperModel(ReplicaModel):
    """The equation of the SOSP 2019 paper (section 3.1): stage max(C, 2(r-1)·W/B) / r, boundary 2·a
    / B.
    """

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        """Compute the busy seconds per minibatch of each resource of stages on `replicas`
        workers.
        """
        assert isinstance(work, CutWork)
        r = np.asarray(replicas, dtype=np.float64)
        bandwidth = self.link.bandwidth_bytes_per_s
        return {
            "compute": np.maximum(work.compute_s, 2 * (r - 1) * work.trainable_bytes / bandwidth)
            / r,
            "receive": 2 * work.cut_before_bytes / bandwidth + 0 * r,
        }

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        # The all-reduce's share grows with r here, so the fewest replicas that compute in time are
        # the only hope.
        return [np.asarray(work.compute_s / target_s)]


class PipedreamModel(ReplicaModel):
    """PipeDream's published optimizer (optimizer_graph_hierarchical.py, one level).

    stage     (C + 4(r-1)·W / (B·r)) / r
    boundary 2·a / (B·r), with the r of the stage after the cut; also of the stage before it, unless
              that is the first, for which the optimizer leaves it out
    """

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        """Compute the busy seconds per minibatch of each resource of stages on `replicas`
        workers.
        """
        assert isinstance(work, CutWork)
        r = np.asarray(replicas, dtype=np.float64)
        bandwidth = self.link.bandwidth_bytes_per_s
        return {
            "compute": (work.compute_s + 4 * (r - 1) * work.trainable_bytes / (bandwidth * r)) / r,
            "receive": 2 * work.cut_before_bytes / (bandwidth * r),
            "send": 2 * work.cut_after_bytes / (bandwidth * r),
        }

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        assert isinstance(work, CutWork)
        bandwidth = self.link.bandwidth_bytes_per_s
        ring_s = 4 * work.trainable_bytes / bandwidth
        cuts = 2 * np.maximum(work.cut_before_bytes, work.cut_after_bytes) / bandwidth
        stage = larger_root(target_s, work.compute_s + ring_s, ring_s)
        return [np.maximum(np.maximum(stage, cuts / target_s), work.compute_s / target_s)]


@dataclass(frozen=True)
class PublishedPlan:
    """The best stages by a published model, and their time and speed-ups by it."""

    path: CutPath
    optimal: bool
    over_one_gpu: float
    over_data_parallel: float

    @property
    def config(self) -> str:
        """Replicas of the stages: "7-1"."""
        return "-".join(map(str, self.path.replicas))

    @property
    def seconds(self) -> float:
        """Seconds per minibatch."""
        return self.path.seconds


def solve_published(
    profile: Profile,
    gpus: int,
    bandwidth_bytes_per_s: float,
    model: type[ReplicaModel] = PipedreamModel,
) -> PublishedPlan:
    """Find the plan that is best by a published model, which knows neither recomputation nor
    divided optimizers.

    As `plan solve` does, it searches along the profile's order, then over all cuts where these are
    few, and otherwise near those of the best plan; such a plan is not known to be optimal.
    """
    costs = LayerCosts(profile)
    priced = model(Link(bandwidth_bytes_per_s))
    limits = Limits(gpus, rules=StageRules(recompute="never", shard_optimizer="never"))

    def search_over(space: CutSpace) -> Search:
        return Search(space, priced, limits)

    chain = CutChain(costs)
    search = search_over(chain)
    path = search.best()
    assert path is not None, "nothing limits the memory"
    optimal = not search.interrupted

    graph = LayerGraph(costs)
    downsets = graph.downsets(max(STANDARD.branches.most_downsets, len(chain)))
    if downsets is not None:
        wider = search_over(CutDownsets(costs, graph.flags(downsets)))
        path = wider.best(path.seconds) or path
        optimal &= not wider.interrupted
    else:
        optimal = False
        tuning = STANDARD.branches

        def faster(space: CutSpace, below_s: float) -> CutPath | None:
            return search_over(space).best(below_s, tuning.min_gain_share)

        paths = improved_cuts(graph, chain, path, faster, tuning, CutDownsets)
        path = [path, *(better for _, better in paths)][-1]

    whole = chain.work(0, np.array([len(chain) - 1]))
    one_s, parallel_s = (float(priced.stage_s(whole, count)[0]) for count in (1, gpus))
    return PublishedPlan(path, optimal, one_s / path.seconds, parallel_s / path.seconds)
