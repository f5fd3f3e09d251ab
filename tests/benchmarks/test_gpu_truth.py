"""Rows of published runs: how they are summarised, and that the planner expresses those that it
can.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median

import pytest

from benchmarks.gpu_truth import aceso, calculon, dgxc, nanotron, own_h200, primus, sailor, vtrain
from benchmarks.gpu_truth.aceso_links import Rates
from benchmarks.gpu_truth.by_layers import in_sequence, parts_of
from benchmarks.gpu_truth.calibrated import calibrated
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.llm_foundry import A100, H100, pairs
from benchmarks.gpu_truth.nanotron_model import Llama
from benchmarks.gpu_truth.rows import ANCHORS, Prediction, Row, device, half_precision
from benchmarks.gpu_truth.summary import scatter_svg, summary
from planner.profiler.estimated.devices import DEVICES, DeviceSpec

needs_anchors = pytest.mark.skipif(not ANCHORS.is_dir(), reason="the measurements are not here")


def test_summary() -> None:
    rows = [
        Row("s", "a", "1", 1.0, predicted=Prediction(1.1, ((9.0, 10.0), (13.0, 10.0)))),
        # chosen, and twice as slow as the first
        Row("s", "a", "2", 2.0, predicted=Prediction(1.0)),
        Row("s", "b", "1", 4.0, predicted=Prediction(3.0)),
        Row("s", "b", "2", 5.0, predicted=Prediction(6.0), calibrated_s=5.5),
        Row("s", "c", "1", 1.0, needs=("tensor parallelism",)),
    ]
    found = summary(rows)
    assert found.mean_error == pytest.approx((0.1 + 0.5 + 0.25 + 0.2) / 4)
    assert found.bias == pytest.approx((0.1 - 0.5 - 0.25 + 0.2) / 4)
    assert found.tau == 0.0  # one pair in order, one not
    assert found.regret == pytest.approx(0.5)
    assert found.calibrated == pytest.approx(0.1)
    assert found.by_job is None
    assert (found.memory_error, found.worst_memory) == pytest.approx((0.2, 0.3))
    assert scatter_svg(rows).count("<circle") == 4


def test_aceso_runs_the_largest_kinds_again() -> None:
    layer = list(aceso._LAYER)
    names = ["embedding", *layer, *layer]
    pairs = [
        (names[number], number // 13)
        for number in sorted(aceso.recomputing(names, 6, attention=16))
    ]
    # Of the first matrices as many as are needed, and the operator after each.
    assert pairs == [
        ("score", 0),
        ("softmax", 0),
        ("dropout", 0),
        ("context", 0),
        ("dropout", 1),
        ("context", 1),
    ]
    again = aceso.recomputing(names, 6, attention=16)
    assert [(names[group.start], len(group)) for group in aceso.groups_of(names, again)] == [
        ("score", 4),
        ("dropout", 2),
    ]
    assert len(aceso.recomputing(names, len(names), attention=16)) == len(names)


def test_aceso_sends_each_byte_once_between_servers_and_gathers_it_inside() -> None:
    """A hidden state of 48 MiB: two flows of 6.8 GiB/s or so are more than the 10.7 GB/s of a
    server of A100.
    """
    rates, size = Rates.of("a100"), 48 * 2**20
    assert rates.message_s(size, 0.0, (2, 1), inside=False) == pytest.approx(
        size / 6.77 / 2**30, rel=0.03
    )
    divided = rates.message_s(0.0, size, (2, 2), inside=False)
    assert divided == pytest.approx(size / 10.7032e9)
    gathered_s = size / 2 / rates.reduce_bytes_per_s(2, size)
    assert rates.message_s(size, 0.0, (2, 2), inside=False) == pytest.approx(divided + gathered_s)
    assert rates.message_s(size, 0.0, (2, 2), inside=True) < 0.2 * divided
    # What contradicts itself is not used.
    assert Rates.of("a10g").message_s(size, 0.0, (1, 1), inside=False) == pytest.approx(size / 4e9)


def test_an_all_reduce_of_aceso_is_as_fast_as_others_of_its_size() -> None:
    """40 MiB on two L4 took 10.6 ms, and half of these and twice as many took as long per byte."""
    assert Rates.of("l4").reduce_bytes_per_s(2, 40 * 2**20) == pytest.approx(
        40 * 2**20 / 10.6e-3, rel=0.02
    )


def test_recipes_of_nvidia_have_all_layers_in_their_stages() -> None:
    for recipe in dgxc.RECIPES:
        blocks = dgxc.blocks_of(recipe.gpt.layers, recipe.pipeline * recipe.chunks)
        assert sum(blocks) == recipe.gpt.layers
        assert min(blocks) > 0
    assert list(dgxc.blocks_of(126, 64)) == [1, *[2] * 62, 1]


def test_shared_keys_are_fewer_weights_and_as_much_attention() -> None:
    spec, run = device("h100"), half_precision()
    gpt = Gpt("gpt", 2, 1024, 8, 4096, 1024, 512, biases=False, gated=True, flash=True)
    own, shared = (
        parts_of(each, 1, run, spec, "bfloat16").operators
        for each in (gpt, replace(gpt, key_heads=2))
    )
    assert (
        sum(layer.weight_bytes for layer in own) - sum(layer.weight_bytes for layer in shared)
        == 2 * 2 * 768 * 1024
    )
    times = [
        [layer.forward_s for layer in layers if "attention" in layer.op] for layers in (own, shared)
    ]
    assert times[0]
    assert times[0] == pytest.approx(times[1], rel=0.2)


@pytest.mark.slow
def test_a_recipe_of_nvidia_is_predicted() -> None:
    row = next(iter(dgxc.rows())).now()
    assert row.error == pytest.approx(0.0, abs=0.2)


def test_calibration_does_not_look_at_the_row_that_it_is_judged_by() -> None:
    def row(job: str, share: float, measured_s: float) -> Row:
        def predict(spec: DeviceSpec) -> Prediction:
            arithmetic = (
                DEVICES["l4"].achieved_arithmetic["gemm"] / spec.achieved_arithmetic["gemm"]
            )
            bandwidth = DEVICES["l4"].achieved_bandwidth["gemm"] / spec.achieved_bandwidth["gemm"]
            return Prediction(share * arithmetic + (1 - share) * bandwidth)

        return Row("s", job, "", measured_s, predict, spec=DEVICES["l4"]).now()

    rows = [
        row(job, share, 1.1)
        for job, share in zip("aabbccdd", (0.9, 0.5, 0.8, 0.2, 0.7, 0.4, 0.6, 0.3), strict=True)
    ]
    found = calibrated(rows)
    # Each is close to the truth, which is 10% more, and as far from it whatever was measured.
    assert [each.calibrated_s for each in found] == pytest.approx([1.1] * 8, abs=0.02)
    assert [each.by_job_s for each in found] == pytest.approx([1.1] * 8, abs=0.03)
    other = calibrated([replace(rows[0], measured_s=2.0), *rows[1:]])
    assert other[0].calibrated_s == found[0].calibrated_s
    assert other[1].calibrated_s != found[1].calibrated_s
    # Two jobs cannot say whether a fit helps with a third.
    assert [each.by_job_s for each in calibrated(rows[:6])] == [1.0] * 6


def test_summary_of_rows_without_prediction() -> None:
    found = summary([Row("s", "a", "1", 1.0, needs=("offload",))])
    assert (found.mean_error, found.bias, found.tau, found.regret) == (None, None, None, None)


def test_saved_bytes_are_those_of_the_paper() -> None:
    """Korthikanti et al. 2022, equations 2 and 4: 10 + 24/t + 5as/(ht), or a t-th of 34 + 5as/h,
    bytes per value.
    """
    gpt, ranks, samples = Gpt("gpt", 2, 512, 8, 2048, 1024, 256, dropout=0.1), 4, 2
    spec, run = device("a100-80gb"), half_precision()
    whole, part = (parts_of(replace(gpt, tensor=each), samples, run, spec) for each in (1, ranks))
    values, attention = samples * gpt.seq * gpt.hidden, 5 * gpt.heads * gpt.seq / gpt.hidden
    assert part.layer.saved_bytes / values == pytest.approx(
        10 + 24 / ranks + attention / ranks, rel=0.01
    )
    by_tokens = in_sequence(whole, part, ranks).layer
    assert by_tokens.saved_bytes / values == pytest.approx((34 + attention) / ranks, rel=0.01)
    assert by_tokens.forward_s < part.layer.forward_s


@needs_anchors
def test_sailor_is_priced_from_its_own_layers() -> None:
    rows = list(sailor.rows())
    assert len(rows) == 9
    found = summary(rows)
    assert found.tau is not None
    assert found.tau >= 0.8


@pytest.mark.slow
@needs_anchors
def test_rows_with_tensor_parallelism_are_predicted() -> None:
    divided = [vtrain._row(record) for record in _records()]
    assert len(divided) == 43
    assert not any(row.needs for row in divided)
    groups = [row for row in aceso.rows() if ", tp " in row.plan]
    assert len(groups) == 17
    megatron = next(iter(calculon.rows()))
    # the second has stages of two ranks beside stages of one
    for row in (divided[0], groups[5], megatron):
        assert row.now().error == pytest.approx(0.0, abs=0.2)


def _records() -> list[dict[str, float]]:
    lines = (ANCHORS / "vtrain-multi.csv").read_text(encoding="utf-8").split()
    names = lines[0].split(",")
    records = [dict(zip(names, map(float, line.split(",")), strict=True)) for line in lines[1:]]
    return [record for record in records if record["tp"] > 1]


def test_nanotron_balances_the_head_against_layers() -> None:
    """The head of 1.34 billion parameters costs four layers, and a stage ends with the block that
    exceeds its share.
    """
    llama = Llama(16, 2048, 32, 8192, 131072, 4096)
    counts = [
        [stage.count(kind) for kind in nanotron.KINDS] for stage in nanotron.stages_of(llama, 2)
    ]
    assert counts == [[1, 11, 0, 0], [0, 5, 1, 1]]
    assert nanotron.stages_of(llama, 8)[-1] == ["head", "loss"]


def test_nanotron_reduces_whole_weights_in_buckets_of_25_mb() -> None:
    assert nanotron.buckets([5_000_000, 7_500_000, 1_000_000, 30_000_000, 1_000_000]) == 3


@needs_anchors
def test_checks_take_what_ten_all_reduces_of_each_job_say() -> None:
    """Their hosts wait for the checks of all ten and of the barrier after them, beside which the
    GPUs only finish.

    Within a server the GPUs take longer than the checks, of which the first and the barrier's show.
    """
    near: dict[bool, list[float]] = {True: [], False: []}
    across = list[float]()
    for run in nanotron.runs():
        if run.rates is None or run.near_reduce_bytes_per_s is None or run.gpus < 64:
            continue
        near[run.checked].append(2 * 7 / 8 * 2**30 / run.near_reduce_bytes_per_s)
        if run.checked:
            moved = 2 * (run.gpus - 1) / run.gpus * 2**30
            usual_s = moved / nanotron.usual_rates()[run.servers].reduce_bytes_per_s
            across.append((10 * moved / run.rates.reduce_bytes_per_s - usual_s) / 11 / run.gpus)
    assert min(len(across), len(near[False])) > 100
    assert median(across) == pytest.approx(nanotron.EAGER.check_far_s, rel=0.05)
    waited_s = 10 * (median(near[True]) - median(near[False]))
    assert waited_s / 2 / 8 == pytest.approx(nanotron.EAGER.check_s, rel=0.05)


def test_a_divided_optimizer_leaves_all_of_the_reduction_to_the_end() -> None:
    """Nothing overlaps, weights are copied rank by rank, and the device goes on while its host
    waits for checks.
    """
    llama = Llama(4, 256, 8, 1024, 4096, 128)
    rates = nanotron.Rates(170e9, 170e9)
    plain = nanotron.Run(0.01, llama, 16, 16, 1, 1, 4, False, 1.0, 1.0, rates, None, False)
    links = nanotron.Links({2: rates}, nanotron.EAGER.step_s, nanotron.EAGER.message_s)

    def seconds(run: nanotron.Run) -> float:
        return nanotron.synchronize_s(
            run, nanotron.stages_of(llama, 1)[0], 1.0, 0.0, nanotron.EAGER, links
        )

    sizes = [
        size for kind in ("embedding", "loss") for size in nanotron.block_of(llama, kind, 1).sizes
    ]
    sizes += 4 * nanotron.block_of(llama, "layer", 1).sizes
    divided = replace(plain, sharded=True)
    reduced_s = links.reduce_s(4 * sum(sizes), 16, 8)
    assert seconds(divided) - seconds(plain) > 16 * len(sizes) * 9e-6 + 0.99 * reduced_s
    # All ranks at the end, replicas for the loss, gradients and weights.
    device_s = reduced_s + links.gather_s(2 * sum(sizes), 16, 8)
    checks_s = 4 * 16 * 0.29e-3
    assert device_s < checks_s
    assert seconds(replace(divided, checked=True)) - seconds(divided) == pytest.approx(
        checks_s - device_s
    )


def test_gradients_wait_for_the_links_of_layers_that_are_divided_across_servers() -> None:
    llama = Llama(4, 256, 16, 1024, 4096, 128, tensor=16)
    rates = nanotron.Rates(170e9, 170e9)
    run = nanotron.Run(0.01, llama, 32, 2, 1, 1, 4, False, 1.0, 1.0, rates, None, False)
    links = nanotron.Links({2: rates}, nanotron.EAGER.step_s, nanotron.EAGER.message_s)

    def seconds(backward_s: float) -> float:
        return nanotron.synchronize_s(
            run, nanotron.stages_of(llama, 1)[0], backward_s, 0.0, nanotron.EAGER, links
        )

    assert seconds(1.0) == pytest.approx(seconds(0.001))  # nothing hides behind a longer backward


def test_small_all_reduces_take_hops_of_a_tree() -> None:
    """As NCCL's model says: 7 hops in a server and one more per doubling of servers, up and down
    again.
    """
    links = nanotron.Links({4: nanotron.Rates(1e15, 1e15)}, 40e-6, 0.0)
    near_s, far_s = 5e-6, 8 * 40e-6 - 7 * 5e-6
    assert links.reduce_s(8.0, 32, 8) == pytest.approx(2 * (7 * near_s + 2 * far_s), rel=1e-3)
    assert links.reduce_s(8.0, 32, 8, 10) == pytest.approx(
        10 * links.reduce_s(0.8, 32, 8), rel=1e-3
    )


def test_a_host_that_is_ahead_keeps_what_its_device_has_not_yet_scattered() -> None:
    """Two tensors per layer and direction, as far as CUDA queues launches, or all forwards of a
    first stage but one.
    """
    llama = Llama(16, 256, 8, 1024, 4096, 128, tensor=2)
    plain = nanotron.Run(0.01, llama, 16, 8, 1, 1, 4, False, 1.0, 1.0, None, None, False)
    stages = nanotron.stages_of(llama, 4)
    assert stages[0] == ["embedding", *["layer"] * 5]
    # Five layers fit into the queue; with one microbatch nothing follows the backward.
    assert nanotron.pending(plain, stages[0], 0) == 2 * (2 * 5 + 1)
    assert nanotron.pending(replace(plain, microbatches=1), stages[0], 0) == 2 * 5 + 1
    whole = nanotron.stages_of(llama, 1)[0]
    assert 32 < nanotron.pending(plain, whole, 0) < 2 * (2 * 16 + 1)
    checked = replace(plain, checked=True, stages=4, microbatches=8)
    assert [nanotron.pending(checked, stages[0], number) for number in (0, 1)] == [
        2 * (2 * 5 + 1),
        0,
    ]
    assert nanotron.pending(replace(checked, stages=2), stages[0], 0) == 0


@needs_anchors
def test_jobs_that_check_are_told_apart_by_their_all_gathers() -> None:
    """None is near the border: with checks they take 1.02 times what is allowed at least, without
    0.86 at most.
    """
    for run in nanotron.runs():
        if run.rates is not None and run.gpus > 8:
            seconds = (1 - 1 / run.gpus) * 2**30 / run.rates.gather_bytes_per_s
            ratio = seconds / (3e-3 + 0.16e-3 * run.gpus)
            assert ratio > 1.01 if run.checked else ratio < 0.87


@needs_anchors
def test_steps_of_rings_across_servers_are_those_of_measured_all_gathers() -> None:
    """From 8 to 64 servers an all-gather of 1 GiB moves as much per rank, and has more steps."""
    seconds = {
        servers: (1 - 1 / (8 * servers))
        * 2**30
        / nanotron.usual_rates()[servers].gather_bytes_per_s
        for servers in (8, 64)
    }
    assert (seconds[64] - seconds[8]) / (8 * 56) == pytest.approx(nanotron.EAGER.step_s, rel=0.05)


def test_an_h100_is_as_much_faster_than_an_a100_as_in_equal_runs() -> None:
    found = [
        (pair.a100_s / pair.h100_s, pair.seconds(A100) / pair.seconds(H100)) for pair in pairs()
    ]
    measured, estimated = zip(*found, strict=True)
    assert len(found) == 37
    assert fmean(estimated) == pytest.approx(fmean(measured), rel=0.03)


def test_a_rank_of_nanotron_does_its_part() -> None:
    llama = Llama(16, 256, 8, 1024, 4096, 128)
    whole, part = (
        nanotron.block_of(replace(llama, tensor=tensor), "layer", 2) for tensor in (1, 4)
    )
    # norms are whole on every rank
    assert 4 * part.parameters == whole.parameters + 3 * 2 * llama.hidden
    assert part.saved_bytes == pytest.approx(whole.saved_bytes / 4, rel=0.01)
    # The products of a column are three, of the rank's own tokens and of those before and after
    # them.
    assert part.forward.launches.sum() == whole.forward.launches.sum() + 2 * 2


@pytest.mark.parametrize("number", range(4))
def test_estimates_for_the_h200_are_near_what_was_measured(number: int) -> None:
    case = own_h200.load()["profiles"][number]
    ours, theirs = own_h200.estimated(case)["all"], case["kinds"]["all"]
    step_s = sum(ours[name] for name in ("forward_s", "backward_s", "update_s"))
    assert step_s == pytest.approx(case["plain_step_s"], rel=0.25)
    assert ours["saved_bytes"] == pytest.approx(theirs["saved_bytes"], rel=1e-3)


def test_most_kernels_of_the_h200_are_estimated_within_a_fifth() -> None:
    kernels = own_h200.load()["kernels"]
    errors = [abs(own_h200.kernel_s(record) / record["us"] * 1e6 - 1) for record in kernels]
    assert len(errors) > 90
    assert median(errors) < 0.1
    assert sum(error < 0.2 for error in errors) > 0.75 * len(errors)


@needs_anchors
def test_schedules_are_as_much_faster_than_1f1b_as_measured() -> None:
    """v-min is not: its waits depend on a share of the backward that no profile measures."""
    rows = {row.plan: row.now() for row in primus.rows() if row.plan != "v-min"}
    first = rows["1f1b"]
    assert first.predicted is not None
    for row in rows.values():
        assert row.predicted is not None
        predicted = first.predicted.seconds / row.predicted.seconds
        assert predicted == pytest.approx(first.measured_s / row.measured_s, rel=0.04), row.plan
