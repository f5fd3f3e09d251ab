"""One question to the searches: which of them answer it, over which cuts, and for which cluster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.cost.layer_costs import Candidate
from planner.cost.link import Link, link_of
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.placement import places_matter
from planner.cost.price import Price
from planner.cost.pricing import busy_resources, price
from planner.cost.rounding import SLACK
from planner.cost.setting import Setting
from planner.cost.stage_options import RecomputeRule
from planner.cost.topology import Topology
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import CostModelName
from planner.schedule.schedule import Schedule
from planner.solver.bounds.balance import balanced_s
from planner.solver.bounds.registry import bounds_for
from planner.solver.candidates.deadline import NO_HURRY, Deadline
from planner.solver.chain.search import Path, Search, stages_along
from planner.solver.chain.states import StateSpace
from planner.solver.chain.synchronous import SynchronousSearch
from planner.solver.graph.branches import MOST_STATES, search_beyond
from planner.solver.graph.downsets import Downsets, enumerate_downsets
from planner.solver.infeasible import Fits
from planner.solver.levels.levels import (
    beyond_the_order,
    nearest_path,
    nearest_search,
    search_all_cuts,
    search_levels,
)
from planner.solver.levels.stage_bounds import Question

MOST_DRAINED_STATES = 600  # the search for schedules that drain is slower
MOST_DRAINED_GPUS = 64  # beyond, it is not asked whether a schedule that drains would fit


class Task:
    """One question to the searches, which can be asked again for another cluster."""

    def __init__(
        self,
        space: StateSpace,
        cluster: Cluster,
        model: CostModelName,
        schedule: Schedule,
        microbatches: int,
        recompute: RecomputeRule,
        deadline: Deadline = NO_HURRY,
    ) -> None:
        self.space, self.cluster, self.recompute, self.deadline = space, cluster, recompute, deadline
        self.interrupted = False  # by the deadline: the last search may have missed faster plans
        self.model, self.schedule, self.microbatches = model, schedule, microbatches
        self.link = link_of(cluster)
        self.met: list[Path] = []  # on the way to the best, of schedules that drain

    def best(self) -> Path | None:
        """The best path on the cluster."""
        if self.placed:
            question = self.question()
            path, self.interrupted = nearest_path(question)
            return path
        search = self._search(self.cluster.gpus, self.cluster.memory_bytes)
        path = search.best()
        self.interrupted = search.interrupted
        if isinstance(search, SynchronousSearch):
            self.met = search.found
        return path

    def beyond_the_order(self, path: Path) -> tuple[Task, Path, float]:
        """The best path over all cuts as far as it can be told, the task whose states it has, and a lower bound.

        For a model that keeps its order, other cuts only bound what is possible.
        """
        if self.interrupted:
            return self, path, self.relaxed_s()
        if self.space.complete:
            return self, path, path.seconds
        if not self.schedule.asynchronous:
            return self._beyond_drained(path)
        model = bounds_for(self.model, self.link, self.schedule, self.microbatches)
        layer_costs, cluster = self.space.layer_costs, self.cluster
        memory = cluster.memory_bytes
        beyond = search_beyond(
            layer_costs,
            model,
            cluster.gpus,
            memory,
            self.space,
            path,
            self.recompute,
            bound_only=self.keeps_order,
            deadline=self.deadline,
        )
        bound_s = beyond.bound_s
        if beyond.path is None or beyond.space is None or self.keeps_order:
            return self, path, bound_s
        return self.over(beyond.space), beyond.path, bound_s

    @property
    def placed(self) -> bool:
        """Whether it matters which ranks a stage has."""
        return places_matter(self.cluster, self.schedule)

    def over_levels(self, path: Path) -> tuple[Task, Path, float]:
        """`beyond_the_order` for a cluster of several levels, from the best path on the nearest flat one."""
        if self.interrupted:
            return self, path, self.relaxed_s()
        question = self.question()
        along = search_levels(question, self.seconds, path, self.strain)
        assert along.path is not None
        if self.space.complete:
            return self, along.path, along.bound_s
        if not self.schedule.stashes:
            return self, along.path, self.relaxed_s()
        if self.keeps_order:
            return self, along.path, min(along.path.seconds, beyond_the_order(question, path).bound_s)
        wider, found = search_all_cuts(question, lambda over: self.over(over).seconds, along.path, path)
        assert found.path is not None
        return self.over(wider), found.path, found.bound_s

    def seconds(self, path: Path) -> float:
        """The price of a path; infinite when it does not fit the memory."""
        _, cost = self.priced(path)
        limit = self.cluster.memory_bytes
        fits = limit is None or all(memory.total_bytes <= limit for memory in cost.memory)
        return cost.seconds_per_minibatch if fits else np.inf

    def strain(self, path: Path) -> float:
        """The price, and a thousandth for how uneven the stages are: so that local search leaves plans where several
        resources are as busy, and no single step helps."""
        if not self.schedule.stashes or (self.cluster.memory_bytes is not None and not np.isfinite(self.seconds(path))):
            return self.seconds(path)
        stages = stages_along(self.space, path)
        resources = busy_resources(self.space.layer_costs, stages, Setting(self.cluster, cost_model=self.model))
        busy_s = [max(map(float, each.values())) for each in resources]
        seconds = max(busy_s)
        uneven = sum(r * each**2 for r, each in zip(path.replicas, busy_s, strict=True)) / self.cluster.gpus
        return seconds + 1e-3 * uneven / seconds if seconds > 0 else seconds

    @property
    def keeps_order(self) -> bool:
        """Whether stages must be runs of consecutive layers: the executor builds no others."""
        return self.space.layer_costs.profile.trainable

    def over_all_cuts(self) -> Task | None:
        """The same task over every cut of the graph, or None where those are too many."""
        most = MOST_STATES if self.schedule.asynchronous else MOST_DRAINED_STATES
        words = enumerate_downsets(self.space.layer_costs, most)
        return None if words is None else self.over(Downsets(self.space.layer_costs, words, complete=True))

    def leaner(self) -> dict[str, Fits]:
        """Ways to need less memory, by the arguments that ask for them."""
        found: dict[str, Fits] = {}
        if self.recompute == "never":
            freely = Task(self.space, self.cluster, self.model, self.schedule, self.microbatches, "auto", self.deadline)
            found["`recompute=auto`"] = freely.fits
        if self.model == "resource" and self.cluster.gpus <= MOST_DRAINED_GPUS:
            microbatches = max(self.microbatches, self.cluster.gpus)
            for schedule in self.schedule.leaner:
                leaner = Task(
                    self.space, self.cluster, self.model, schedule, microbatches, self.recompute, self.deadline
                )
                found[f"`schedule={schedule}` `microbatches={microbatches}`"] = leaner.fits
        return found

    def over(self, space: StateSpace) -> Task:
        """The same task over other cuts."""
        return Task(space, self.cluster, self.model, self.schedule, self.microbatches, self.recompute, self.deadline)

    def _beyond_drained(self, path: Path) -> tuple[Task, Path, float]:
        """`beyond_the_order` for schedules that drain."""
        wider = None if self.deadline.passed else self.over_all_cuts()
        best = None if wider is None else wider.best()
        if wider is None or best is None or wider.interrupted:
            return self, path, self.relaxed_s()
        if best.seconds >= path.seconds * (1 - SLACK):
            return self, path, path.seconds
        return (self, path, best.seconds) if self.keeps_order else (wider, best, best.seconds)

    def fits(self, gpus: int, memory_bytes: int) -> tuple[Sequence[Candidate], Price] | None:
        """Any plan that fits other GPUs of this kind."""
        search = self._search(gpus, memory_bytes)
        if isinstance(search, Search):
            path = search.within(search.any_time_s())
        else:
            answer = search.within(np.inf)
            path = None if answer is None else answer[0]
        return None if path is None else self.priced(path)

    def priced(self, path: Path) -> tuple[Sequence[Candidate], Price]:
        """The path's stages and their price."""
        stages = stages_along(self.space, path)
        # Memory was the search's business; the number of GPUs may be a supposed one.
        cluster = self.cluster if path.gpus <= self.cluster.gpus else _flat_cluster(self.link, path.gpus, None)
        return stages, price(
            self.space.layer_costs, stages, Setting(cluster, self.schedule, self.microbatches, cost_model=self.model)
        )

    def question(self) -> Question:
        """This task for the searches that know levels."""
        return self._question(self.cluster.gpus, self.cluster.memory_bytes)

    def _question(self, gpus: int, memory_bytes: int | None) -> Question:
        objective = self.model if self.schedule.stashes else self._drained
        return Question(
            self.space, Topology(self.cluster), objective, gpus, memory_bytes, self.recompute, self.deadline
        )

    @property
    def _drained(self) -> SynchronousModel:
        return SynchronousModel(self.link, self.schedule, self.microbatches)

    def relaxed_s(self) -> float:
        """A time below which no plan can be, whatever its cuts: perfect balance and no communication."""
        setting = Setting(self.cluster, self.schedule, self.microbatches, cost_model=self.model)
        return balanced_s(self.space.work(0, np.array([len(self.space) - 1])), setting)

    def _search(self, gpus: int, memory_bytes: int | None) -> Search | SynchronousSearch:
        if self.placed:
            return nearest_search(self._question(gpus, memory_bytes))
        if self.schedule.asynchronous:
            asynchronous = bounds_for(self.model, self.link, self.schedule, self.microbatches)
            return Search(self.space, asynchronous, gpus, memory_bytes, self.recompute, self.deadline)
        return SynchronousSearch(self.space, self._drained, gpus, memory_bytes, self.recompute, self.deadline)


def _flat_cluster(link: Link, gpus: int, memory_bytes: int | None) -> Cluster:
    return flat_cluster(
        gpus,
        link.bandwidth_bytes_per_s,
        memory_bytes,
        link.latency_s,
        all_reduce_bandwidth_bytes_per_s=link.all_reduce_bandwidth_bytes_per_s,
        overlap=link.overlap,
    )
