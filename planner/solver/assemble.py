"""From the chosen stages and their price to the Plan: names, ranks, transfers, predictions."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.price import Price
from planner.cost.weight_copies import adding_of_copies_s, copied_in, ready_of_gradients_s, update_of_copies_s
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan, SolverReport, Stage, config_of
from planner.schedule.schedule import Schedule
from planner.simulator.plan import simulated_s
from planner.solver.candidates.exchanged import shared_between, transfers
from planner.solver.candidates.pipelines import stage_ranks
from planner.solver.predict import predict


def assemble(
    layer_costs: LayerCosts,
    cluster: Cluster,
    stages: Sequence[Candidate],
    price: Price,
    schedule: Schedule,
    microbatches: int,
    report: SolverReport,
) -> Plan:
    """The Plan of these stages, on consecutive ranks unless they say which."""
    profile = layer_costs.profile
    return Plan(
        model=profile.model,
        profile_digest=profile.digest,
        graph_hash=profile.graph_hash,
        autocast=profile.autocast,
        memory_format=profile.memory_format,
        compiled=profile.compiled is not None,
        device=profile.device,
        config=config_of(tuple(stage.replicas for stage in stages)),
        schedule=schedule,
        microbatch_size=profile.microbatch_size,
        microbatches=microbatches,
        stages=_stages(layer_costs, stages, price),
        transfers=transfers(layer_costs, stages),
        shared=shared_between(layer_costs, stages),
        predicted=predict(layer_costs, cluster, price, schedule, microbatches, report),
        solver=report,
        cluster=cluster,
    )


def simulated_plan(plan: Plan) -> Plan:
    """The plan with the prediction of its own simulation.

    Raises:
        PlanError: for a plan that cannot be simulated.
    """
    seconds, before = simulated_s(plan), plan.predicted
    faster, bound_s = before.seconds_per_minibatch / seconds, min(plan.solver.lower_bound_s, seconds)
    predicted = before.model_copy(
        update={
            "seconds_per_minibatch": seconds,
            "by": "simulation",
            "samples_per_s": None if before.samples_per_s is None else before.samples_per_s * faster,
            "speedup_over_one_gpu": before.speedup_over_one_gpu * faster,
            "speedup_over_data_parallel": before.speedup_over_data_parallel * faster,
        }
    )
    report = plan.solver.model_copy(update={"lower_bound_s": bound_s, "gap": (seconds - bound_s) / seconds})
    return plan.model_copy(update={"predicted": predicted, "solver": report})


def _stages(layer_costs: LayerCosts, stages: Sequence[Candidate], price: Price) -> tuple[Stage, ...]:
    made: list[Stage] = []
    ranks, copied = stage_ranks(stages, price), copied_in(layer_costs, stages)
    for stage, own, in_flight, memory, again in zip(stages, ranks, price.in_flight, price.memory, copied, strict=True):
        layers = [layer_costs.profile.layers[index] for index in sorted(stage.layers)]
        speed = stage.options.speed
        made.append(
            Stage(
                layers=tuple(layer.name for layer in layers),
                ranks=own,
                in_flight=in_flight,
                recompute=stage.options.recompute,
                forward_s=sum(layer.forward_s for layer in layers) / speed,
                backward_s=sum(layer.backward_s for layer in layers) / speed,
                update_s=sum(layer.update_s for layer in layers) / speed + update_of_copies_s(stage, again),
                accumulate_s=sum(layer.accumulate_s for layer in layers) / speed + adding_of_copies_s(stage, again),
                ready_s=ready_of_gradients_s(layer_costs, stage, again),
                memory=memory,
            )
        )
    return tuple(made)
