"""A string of Megatron's options: its price is that of the same stages, and a better one is better
by the price of the string that is written.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

import planner
from planner.analysis.given_plan import price
from planner.api.trainer_run import GivenRun, TrainerQuestion, answer_trainer, stages_of
from planner.errors import InputError
from planner.exports.configuration import Asked
from planner.exports.megatron import read_arguments
from planner.exports.trainers import TRAINERS
from planner.formats.cluster import Cluster, hierarchical_cluster
from planner.formats.fit import TrainerRun
from planner.formats.profile import Profile
from planner.reporting.tables.trainer_run import trainer_run_report
from planner.solver import search_plan
from planner.solver.clock import Clock
from tests.samples import layer, profile
from tests.solver.test_degrees import divided

BLOCKS = 8
MB = 10**6
SERVERS = partial(hierarchical_cluster, [4, 2], [10**10, 10**9])


def model(size: int) -> Profile:
    """Blocks whose products are more efficient for larger microbatches, between embedding and
    head.
    """
    seconds = 0.2 + 0.8 * size
    blocks = (
        layer(
            f"h.{number}.{part}",
            seconds,
            2 * seconds,
            output_bytes=size * MB,
            weight_bytes=20 * MB,
            saved_bytes=4 * size * MB,
        )
        for number in range(BLOCKS)
        for part in ("attn", "mlp")
    )
    ends = layer("wte", 0.1, 0.1, output_bytes=size * MB), layer("head", 0.5, 1.0)
    made = profile(ends[0], *blocks, ends[1], microbatch_size=size)
    return divided(made.model_copy(update={"optimizer_elementwise": True}), 2, 4)


def asked(text: str, cluster: Cluster | None = None) -> TrainerRun:
    """Ask about a string without any other plan beside it."""
    cluster = SERVERS() if cluster is None else cluster
    return answer_trainer(question(text, cluster), None)


def question(
    text: str, cluster: Cluster, profile_at: Callable[[int], Profile] = model
) -> TrainerQuestion:
    given = GivenRun(TRAINERS[0], text, read_arguments(text), Asked())
    return TrainerQuestion(given, cluster, profile_at, Clock())


def test_the_price_is_that_of_the_same_stages() -> None:
    text = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 2 "
        "--global-batch-size 32 --use-distributed-optimizer --recompute-granularity full "
        "--recompute-method block --recompute-num-layers 3"
    )
    given = asked(text).given
    same = planner.price(
        model(2),
        SERVERS(),
        2,
        replicas="2x2",
        recompute="all:3",
        shard_optimizer="all",
        schedule="1f1b-flush",
        microbatches=16,
    )
    assert given.predicted.seconds_per_minibatch == same.predicted.seconds_per_minibatch
    assert given.stages == same.stages
    assert given.samples_per_update == (32, 32)


def test_chunks_are_interleaved() -> None:
    text = (
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 "
        "--micro-batch-size 1 --global-batch-size 32"
    )
    given = asked(text).given
    assert (given.chunks, len(given.stages), str(given.schedule)) == (2, 8, "interleaved")


@pytest.mark.parametrize("seed", range(8))
def test_a_better_string_is_better_when_it_is_read_again(seed: int) -> None:
    rng = random.Random(seed)
    memory_bytes = rng.choice((None, 400 * MB, 1000 * MB))
    cluster = SERVERS(memory_bytes)
    tensor = rng.choice((1, 2, 4))
    pipeline = rng.choice([each for each in (1, 2, 4, 8) if 8 % (each * tensor) == 0])
    text = (
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} "
        f"--micro-batch-size {rng.choice((1, 2))} --global-batch-size 64"
    )
    answer = asked(text, cluster)
    fits = not any(map(answer.given.lacking_bytes, range(len(answer.given.stages))))
    assert answer.better is not None
    assert answer.arguments is not None
    written = read_arguments(answer.arguments)
    assert written.unknown == ()
    assert written.global_batch == 64
    size = written.micro_batch
    stages = stages_of(written, model(size), cluster.gpus)
    again = price(model(size), cluster, stages)
    assert again.predicted == answer.better.predicted
    if fits:
        assert answer.speedup is not None
        assert answer.speedup > 1


def test_the_answer_of_a_search_competes_and_bounds() -> None:
    """Where it has a form in Megatron's options; else the bound is all that is used of it."""
    text = "--tensor-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 64"
    about = question(text, SERVERS())
    for tensor in ((1,), (2, 4)):
        found = search_plan(
            model(1), SERVERS(), schedule="1f1b-flush", microbatches=64, tensor=tensor
        )
        answer = answer_trainer(about, found)
        assert answer.speedup is not None
        assert answer.most_speedup is not None
        assert answer.most_speedup >= answer.speedup
        assert f"{answer.speedup:.2f}x, at most" in trainer_run_report(answer)


def test_what_is_not_understood_is_named() -> None:
    answer = asked("--micro-batch-size 1 --global-batch-size 8 --context-parallel-size 2 --fp8")
    assert answer.unknown == ("--context-parallel-size 2", "--fp8")
    text = trainer_run_report(answer)
    assert (
        "--context-parallel-size 2, --fp8: not understood, so this is the price of a run without "
        "them" in text
    )
    assert "limited by" in text


def test_ranks_that_divide_experts_have_no_price() -> None:
    """In Megatron, the same size divides whole layers."""

    def with_experts(size: int) -> Profile:
        made = model(size)
        assert made.tensor is not None
        experts = (0, *([16, 0] * BLOCKS), 0)
        known = [
            costs.model_copy(update={"by_samples": True, "experts": experts})
            for costs in made.tensor
        ]
        return made.model_copy(update={"tensor": tuple(known)})

    text = "--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 8"
    about = question(text, SERVERS(), with_experts)
    with pytest.raises(InputError, match="shard its experts and the samples of a microbatch here"):
        answer_trainer(about, None)


def test_what_no_run_of_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="8 layers cannot be split equally over 3 stages"):
        stages_of(
            read_arguments(
                "--pipeline-model-parallel-size 3 --micro-batch-size 1 --global-batch-size 8"
            ),
            model(1),
            6,
        )
    with pytest.raises(InputError, match="8 GPUs are no copies of 1 stages of 3 ranks"):
        asked("--tensor-model-parallel-size 3 --micro-batch-size 1 --global-batch-size 8")


def test_what_limits_a_run_is_said_whether_or_not_it_is_simulated_again() -> None:
    small = "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16"
    large = "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8192"
    assert "% bubble" in trainer_run_report(asked(small))
    answer = asked(large)
    assert "by the cost model" in trainer_run_report(answer)
