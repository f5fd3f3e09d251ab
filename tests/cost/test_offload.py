"""The optimizer offloaded to the host: bytes and seconds by hand, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner
from planner.cost.offload import STEP_BYTES_PER_S, optimizer_offload, with_offload
from planner.errors import InputError, PlanError
from planner.exports import export
from planner.formats.cluster import Cluster, OptimizerOffload
from planner.formats.plan import Plan
from planner.formats.profile import Device, Layer, Profile
from planner.plan.trainable import check_base
from planner.reporting.tables.plan import plan_report
from tests.samples import layer, profile
from tests.solver.test_degrees import divided

MILLION = 10**6
A100 = Device(kind="cuda", name="NVIDIA A100 SXM 80 GB", memory_bytes=80 * 10**9)
LINK, STEP = 20e9, 100e9  # bytes/s
SLOW_HOST = OptimizerOffload(link_bytes_per_s=LINK, step_bytes_per_s=STEP)


def trained(name: str, millions: int) -> Layer:
    """Weights in bfloat16, gradients in float32, masters and two moments in float32."""
    plain = layer(name, 1e-3, 2e-3, output_bytes=100, weight_bytes=2 * millions * MILLION)
    states = {
        "gradient_bytes": 4 * millions * MILLION,
        "optimizer_bytes": 12 * millions * MILLION,
        "update_s": 1e-4,
        "update_workspace_bytes": millions * MILLION,
    }
    return plain.model_copy(update=states)


def model(*millions: int) -> Profile:
    layers = (trained(f"layer{number}", count) for number, count in enumerate(millions))
    known = {"device": A100, "master_weights": "bfloat16", "optimizer_elementwise": True}
    return profile(*layers).model_copy(update=known)


def update_s(millions: float, link: float = LINK, step: float = STEP) -> float:
    """4 bytes of a gradient go, 2 of a weight come; the CPU reads and writes 12, and reads 4 and
    writes 2.
    """
    return millions * MILLION * ((4 + 2) / link + (2 * 12 + 4 + 2) / step)


def cluster(gpus: int, **more: Any) -> Cluster:
    made = planner.cluster(gpus=gpus, bandwidth="100GB/s")
    return made.model_copy(update={"offload": SLOW_HOST, "memory_bytes": 10**12, **more})


def test_the_update_of_layers_by_hand() -> None:
    known = model(10, 30)
    offloaded = with_offload(known, SLOW_HOST)
    assert with_offload(known, None) == known
    for number, millions in enumerate((10, 30)):
        before, after = known.layers[number], offloaded.layers[number]
        assert after.update_s == pytest.approx(update_s(millions))
        assert (after.optimizer_bytes, after.update_workspace_bytes) == (0, 0)
        assert (after.weight_bytes, after.gradient_bytes, after.forward_s) == (
            before.weight_bytes,
            before.gradient_bytes,
            before.forward_s,
        )


def test_frozen_layers_are_not_moved_and_float32_gets_a_copy_on_the_host() -> None:
    frozen = layer("frozen", weight_bytes=100).model_copy(update={"gradient_bytes": 0})
    single = layer("single", weight_bytes=4 * MILLION).model_copy(
        update={"optimizer_bytes": 8 * MILLION}
    )
    known = profile(frozen, single).model_copy(update={"device": A100})
    still, stepped = with_offload(known, SLOW_HOST).layers
    assert still.update_s == 0
    # states of 8 bytes and weights of 4, read and written, and both gradients and weights sent
    moved = 2 * (8 + 4) + 4 + 4
    assert stepped.update_s == pytest.approx(MILLION * (8 / LINK + moved / STEP))


def test_stages_have_states_on_the_host_and_longer_updates() -> None:
    plan = planner.price(model(10, 30), cluster(2), 2, schedule="1f1b-flush", microbatches=4)
    assert [stage.memory.optimizer_bytes for stage in plan.stages] == [0, 0]
    assert [stage.host_bytes for stage in plan.stages] == [120 * MILLION, 360 * MILLION]
    seconds = [stage.update_s for stage in plan.stages]
    assert seconds == pytest.approx([update_s(10), update_s(30)])
    assert "take 480 MB of its memory, of one GPU 360 MB at most; its CPU" in plan_report(plan)

    on_gpus = cluster(2, offload=None)
    usual = planner.price(model(10, 30), on_gpus, 2, schedule="1f1b-flush", microbatches=4)
    freed = [
        one.memory.total_bytes - other.memory.total_bytes
        for one, other in zip(usual.stages, plan.stages, strict=True)
    ]
    # with the share that PyTorch's allocator reserves beyond the states, at least
    assert all(size >= 12 * n * MILLION for size, n in zip(freed, (10, 30), strict=True))
    assert plan.profile_digest == usual.profile_digest
    assert "offload" not in usual.model_dump_json()
    assert "host_bytes" not in usual.model_dump_json()
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_a_single_stage_takes_as_much_longer_as_its_update() -> None:
    """Simulated, where nothing overlaps the update."""
    known = model(10, 30)
    asked: dict[str, Any] = {"schedule": "1f1b-flush", "microbatches": 4}
    offloaded = planner.price(known, cluster(1), 1, **asked)
    usual = planner.price(known, cluster(1, offload=None), 1, **asked)
    longer_s = update_s(40) - 2 * 1e-4
    assert offloaded.predicted.by == "simulation"
    assert offloaded.predicted.speed_interval is None
    assert offloaded.predicted.seconds_per_minibatch == pytest.approx(
        usual.predicted.seconds_per_minibatch + longer_s
    )


def test_replicas_that_shard_the_state_share_the_update() -> None:
    asked: dict[str, Any] = {"schedule": "1f1b-flush", "microbatches": 4, "replicas": 2}
    whole = planner.price(model(10, 30), cluster(2), 1, **asked).stages[0]
    shared = planner.price(model(10, 30), cluster(2), 1, shard_optimizer="all", **asked).stages[0]
    assert (whole.host_bytes, shared.host_bytes) == (480 * MILLION, 240 * MILLION)
    assert whole.update_s == pytest.approx(update_s(40))
    assert shared.update_s == pytest.approx(update_s(20))


def test_ranks_that_divide_layers_offload_their_parts() -> None:
    known = divided(model(10, 30), 2)
    plan = planner.price(known, cluster(2), 1, replicas="1x2", schedule="1f1b-flush")
    costs = (known.tensor or ())[0]
    assert plan.stages[0].host_bytes == sum(costs.optimizer_bytes)
    assert plan.stages[0].memory.optimizer_bytes == 0


def test_what_does_not_fit_the_gpu_fits_with_the_host() -> None:
    known = model(10, 30)
    need = 40 * (2 + 4) * MILLION
    small = {"memory_bytes": 3 * 10**9 + need}
    with pytest.raises(planner.InfeasibleError):
        planner.solve(known, cluster(1, offload=None, memory_bytes=2 * 10**9 + 2 * need))
    plan = planner.solve(known, cluster(1, **small), schedule="1f1b-flush")
    assert plan.stages[0].host_bytes == 480 * MILLION


@pytest.mark.parametrize(
    ("asked", "link", "sharing"),
    [
        ({"gpus": 8}, 31.5e9 * 0.8, 8),
        ({"servers": 2, "gpus_per_server": 4, "bandwidth": "pcie4,10Gbps"}, 31.5e9 * 0.8, 4),
        ({"servers": 4, "gpus": 4}, 31.5e9 * 0.8, 1),
        ({"topology": "4x2", "bandwidth": "pcie4,10Gbps"}, 31.5e9 * 0.8, 4),
        ({"gpus": 2, "host_bandwidth": "pcie5"}, 63e9 * 0.8, 2),
        ({"gpus": 2, "host_bandwidth": 5e9}, 5e9, 2),
    ],
)
def test_gpus_have_links_of_their_own_and_share_a_cpu(
    asked: dict[str, Any], link: float, sharing: int
) -> None:
    options = {"bandwidth": "pcie4", **asked}
    found = planner.cluster(model(10), offload="optimizer", **options).offload
    assert found == optimizer_offload(link, sharing)
    assert found is not None
    assert found.step_bytes_per_s * sharing == pytest.approx(STEP_BYTES_PER_S)


@pytest.mark.parametrize(
    ("device", "link"),
    [("NVIDIA H100 80GB HBM3", 63e9), ("Tesla T4", 15.75e9), ("imagined", 31.5e9)],
)
def test_the_link_to_the_host_is_that_of_the_profiled_gpu(device: str, link: float) -> None:
    known = model(10).model_copy(update={"device": Device(kind="cuda", name=device)})
    found = planner.cluster(known, gpus=1, bandwidth="pcie4", offload="optimizer").offload
    assert found is not None
    assert found.link_bytes_per_s == pytest.approx(0.8 * link)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    on_cpu = model(10).model_copy(update={"device": Device(kind="cpu", name="any")})
    with pytest.raises(InputError, match="is of a CPU, whose optimizer is in the memory of the"):
        planner.solve(on_cpu, cluster(1))
    with pytest.raises(InputError, match="`host_bandwidth=pcie5` is of a link that nothing"):
        planner.cluster(gpus=1, bandwidth="pcie4", host_bandwidth="pcie5")
    with pytest.raises(InputError, match="`offload` has no price on several kinds of GPUs"):
        planner.fit("gpt2", gpu="v100=4,t4=4", offload="optimizer", place=tmp_path)
    with pytest.raises(InputError, match="int8` is for GPUs: the CPU optimizers of"):
        planner.fit("gpt2", 1, offload="optimizer", optimizer_states="int8", place=tmp_path)
    with pytest.raises(InputError, match="a scale for 256 elements of a whole weight"):
        planner.fit("gpt2", 4, tensor=(2,), optimizer_states="int8", place=tmp_path)
    with pytest.raises(InputError, match="unknown `offload=activations`"):
        planner.cluster(gpus=1, bandwidth="pcie4", offload="activations")  # type: ignore[arg-type]


def test_plans_are_neither_trained_nor_exported_to_what_has_no_words_for_them() -> None:
    plan = planner.price(model(10, 30), cluster(2), 2, schedule="1f1b-flush", microbatches=4)
    with pytest.raises(PlanError, match="in the memory of the host, whose CPU steps them, and"):
        check_base(plan)
    with pytest.raises(PlanError, match="the export for Megatron has no form for an optimizer"):
        export(plan, "megatron")
    with pytest.raises(PlanError, match="the export for torchtitan has no form for an optimizer"):
        export(plan, "torchtitan")
