"""The time per minibatch in the steady state."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.formats.cluster import Cluster, Level
from planner.formats.plan_parts import Exchanged
from planner.schedule.registry import find
from planner.schedule.schedule import PipelineShape
from planner.simulator.pipeline_costs import PipelineCosts, StageCosts
from planner.simulator.simulation import Simulation
from planner.simulator.steady_time import steady_s, unlike_replicas


def _data_parallelism(draw: random.Random) -> PipelineCosts:
    """Return a single stage with drawn replicas, links, and costs."""
    sizes = draw.choice([(2,), (3,), (8,), (2, 4), (4, 3), (2, 2, 2)])
    levels = [
        Level(
            size=size,
            bandwidth_bytes_per_s=draw.uniform(1e6, 1e9),
            latency_s=draw.choice([0.0, 1e-4]),
            shared=draw.random() < 0.5,
        )
        for size in sizes
    ]
    cluster = Cluster(levels=tuple(levels), overlap=draw.random() < 0.7)
    replicas = cluster.gpus

    shape = PipelineShape(
        ranks=(tuple(range(replicas)),),
        channels=(),
        schedule=find(draw.choice(["1f1b-flush", "gpipe", "zb-h1"])),
        microbatches=draw.randint(1, 3 * replicas),
    )
    backward_s = draw.uniform(0.01, 0.2)
    stage = StageCosts(
        forward_s=draw.uniform(0.01, 0.1),
        backward_s=backward_s,
        update_s=draw.choice([0.0, 0.01]),
        recompute_s=draw.choice([0.0, 0.02]),
        accumulate_s=draw.choice([0.0, 0.003]),
        ready_s=draw.choice([(), (0.3 * backward_s, backward_s)]),
        gradient_bytes=draw.randint(0, 10**7),
        sharded=draw.random() < 0.4,
    )
    return PipelineCosts(shape=shape, cluster=cluster, stages=(stage,), transfer_bytes={})


@pytest.mark.parametrize("seed", range(60))
def test_replicas_of_a_single_stage_stand_for_one_another(seed: int) -> None:
    costs = _data_parallelism(random.Random(seed))
    workers = unlike_replicas(costs)
    assert workers is not None
    assert len(workers) <= 2

    few = Simulation(costs, 1, workers=workers)
    whole = Simulation(costs, 1)
    assert few.run() == whole.run() == "done"
    assert few.latest_s == whole.latest_s
    assert few.again_s == whole.again_s
    assert len(few.completed.ends_s[0]) <= len(whole.completed.ends_s[0])


def test_replicas_that_exchange_within_layers_are_all_simulated() -> None:
    costs = _data_parallelism(random.Random(0))
    exchanged = Exchanged(forward_bytes=1000, backward_bytes=1000, bytes_per_s=1e9)
    (stage,) = costs.stages
    assert unlike_replicas(replace(costs, stages=(replace(stage, exchanged=exchanged),))) is None


def test_stages_of_a_pipeline_are_all_simulated() -> None:
    costs = _data_parallelism(random.Random(0))
    shape = replace(costs.shape, ranks=((0,), (1,)))
    assert unlike_replicas(replace(costs, shape=shape, stages=costs.stages * 2)) is None


@pytest.mark.parametrize(("replicas", "microbatches"), [(1, 4000), (2, 4000), (4, 64), (64, 64)])
def test_a_single_stage_takes_its_time_whatever_is_simulated_of_it(
    replicas: int, microbatches: int
) -> None:
    """The first runs a shorter minibatch, the last one replica."""
    shape = PipelineShape(
        ranks=(tuple(range(replicas)),),
        channels=(),
        schedule=find("1f1b-flush"),
        microbatches=microbatches,
    )
    stage = StageCosts(forward_s=1.0, backward_s=2.0, update_s=0.5)
    level = Level(size=replicas, bandwidth_bytes_per_s=1e9)
    costs = PipelineCosts(
        shape=shape, cluster=Cluster(levels=(level,)), stages=(stage,), transfer_bytes={}
    )
    assert steady_s(costs) == pytest.approx(3 * microbatches / replicas + 0.5)
