"""The arguments of `solve` beside profile and cluster, and the fastest of several plans under them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import InputError
from planner.formats.cluster import Cluster
from planner.formats.constraints import Constraints
from planner.formats.names import CostModelName
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.schedule.instructions import CHUNKS, MICROBATCHES_PER_GPU
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.schedule.schedule import Schedule
from planner.solver import solve
from planner.solver.assemble import GIVEN, complete
from planner.solver.evaluate.evaluation import evaluate, priced
from planner.solver.minibatch import microbatches_in
from planner.solver.problem.budget import Budget, Patience
from planner.solver.problem.problem import DepthRule, Problem
from planner.solver.problem.result import Evaluation
from planner.solver.problem.stage_rules import StageRules
from planner.solver.search.integer.answer import SolverName


@dataclass(frozen=True)
class SolveOptions:
    """The arguments of `solve` beside profile and cluster.

    `microbatches`: per minibatch; None means as many as make `minibatch` samples, if that is given, or
    `MICROBATCHES_PER_GPU` for schedules that divide minibatches. `patience`: of everything that is solved or simulated
    under these options, together.
    """

    cost_model: CostModelName = "resource"
    schedule: Schedule = ONE_F_ONE_B
    microbatches: int | None = None
    minibatch: int | None = None  # samples
    depth: DepthRule = "auto"
    rules: StageRules = field(default_factory=StageRules)
    chunks: int = CHUNKS  # of the model on each GPU, under interleaved
    accept_divided_loss: bool = False
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        if self.microbatches is not None and self.minibatch is not None:
            raise InputError("`microbatches` and `minibatch` say the same twice", hint="leave out one of them")

    def microbatches_on(self, cluster: Cluster, profile: Profile) -> int:
        """Return the number of microbatches per minibatch on this cluster.

        Raises:
            InputError: where microbatches of the profile's size do not make the minibatch.
        """
        if self.minibatch is not None:
            return microbatches_in(self.minibatch, profile, self.schedule)
        if self.microbatches is not None:
            return self.microbatches
        return MICROBATCHES_PER_GPU * cluster.gpus if self.schedule.divides else 1

    @property
    def chunks_per_gpu(self) -> int:
        """Stages on each GPU."""
        return self.schedule.fixed_chunks or self.chunks

    def problem(self, layer_costs: LayerCosts, cluster: Cluster) -> Problem:
        """Return the problem of pricing plans on this cluster, by the cost model alone when the time is over."""
        microbatches = self.microbatches_on(cluster, layer_costs.profile)
        setting = Setting(cluster, self.schedule, microbatches, self.chunks_per_gpu, self.cost_model)
        return Problem(layer_costs, setting, self.rules, self.depth, budget=Budget.unlimited(self.patience.deadline))

    def within(self, share: float) -> SolveOptions:
        """Return the same options with this share of the time that is left."""
        return replace(self, patience=self.patience.part(share))

    def price(self, layer_costs: LayerCosts, cluster: Cluster, stages: Sequence[Candidate]) -> Plan:
        """Return the plan of these stages, priced and simulated, whether or not they fit the memory."""
        # A plan that does not fit has a price, too.
        problem = self.problem(layer_costs, cluster.with_memory(lambda _: None))
        return complete(problem, evaluate(problem, stages), GIVEN).model_copy(update={"cluster": cluster})

    def solve(
        self,
        profile: Profile,
        cluster: Cluster,
        *,
        vertical_sync: bool = False,
        solver: SolverName = "auto",
        constraints: Constraints | None = None,
    ) -> Plan:
        """Find the fastest plan; the keywords are those of `planner.solver.solve`, which alternatives do not have.

        Raises:
            InfeasibleError, InputError: as `solve`.
        """
        return solve(
            profile,
            cluster,
            cost_model=self.cost_model,
            schedule=self.schedule,
            microbatches=self.microbatches_on(cluster, profile),
            depth=self.depth,
            **vars(self.rules),
            chunks=self.chunks,
            vertical_sync=vertical_sync,
            solver=solver,
            constraints=constraints,
            accept_divided_loss=self.accept_divided_loss,
            time_limit_s=self.patience.deadline.left_s,
            progress=self.patience.progress,
        )


def check_workers(needed: int, cluster: Cluster) -> None:
    """Check that the cluster has the GPUs that stages need.

    Raises:
        InputError: naming both numbers.
    """
    if needed > cluster.gpus:
        raise InputError(
            f"the stages need {needed} GPUs, and the cluster has {cluster.gpus}", hint=f"give `gpus={needed}` or more"
        )


def fastest(problem: Problem, plans: Iterable[Sequence[Candidate]], *, must_fit: bool = False) -> Evaluation | None:
    """Return the fastest of several lists of stages; None if none fits."""
    best: Evaluation | None = None
    for candidate in sorted((priced(problem, stages) for stages in plans), key=lambda candidate: candidate.seconds):
        if best is not None and candidate.seconds >= best.seconds:
            break  # simulating can only add waiting time
        evaluation = evaluate(problem, candidate.stages)
        if must_fit and not evaluation.fits(problem.cluster):
            continue
        if best is None or evaluation.saves(best, 0.0):
            best = evaluation
    return best
