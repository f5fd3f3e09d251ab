"""The microbatches that a plan with lengths is made for."""

from __future__ import annotations

import random
from collections import Counter
from statistics import fmean

import pytest

from planner.formats.profile import DegreeCosts, Profile
from planner.plan.lengths import DRAWN, expected, mean_tokens, planned, terms
from tests.lengths import LINEAR, QUADRATIC, cost_at, varying_profile
from tests.samples import layer

SAMPLES = [random.Random(number).randint(1, 100) for number in range(500)]


def drawn(profile: Profile, microbatches: int = 1) -> list[int]:
    found = planned(profile, microbatches)
    assert found is not None
    return [row for (row,) in found.microbatches]


def test_terms_are_the_products_of_lengths() -> None:
    assert terms([(50, 10), (100, 40)], (100, 40)) == (
        (1, 0.5, 0.25, 0.25, 0.125, 0.0625),
        (1, 1, 1, 1, 1, 1),
    )


def test_microbatches_of_one_sample_have_the_mean_of_the_data() -> None:
    for order in ("random", "buckets"):
        profile = varying_profile([layer("a")], [LINEAR], SAMPLES, order)
        assert fmean(drawn(profile)) == pytest.approx(fmean(SAMPLES), rel=0.01)


def test_buckets_are_padded_less_and_have_alike_microbatches() -> None:
    size, microbatches = 8, 4
    by_order = {
        order: drawn(varying_profile([layer("a")], [LINEAR], SAMPLES, order, size), microbatches)
        for order in ("random", "buckets")
    }
    assert all(len(found) == DRAWN for found in by_order.values())
    assert fmean(by_order["buckets"]) < 1.02 * fmean(SAMPLES)
    shuffled = random.Random(1).sample(SAMPLES, len(SAMPLES))
    longest = [
        max(shuffled[start : start + size]) for start in range(0, len(shuffled) - size, size)
    ]
    assert fmean(by_order["random"]) == pytest.approx(fmean(longest), rel=0.03)
    groups = [
        by_order["buckets"][start : start + microbatches] for start in range(0, DRAWN, microbatches)
    ]
    assert max(max(group) - min(group) for group in groups) <= 5
    assert [min(group) for group in groups] != sorted(min(group) for group in groups)
    # However many make a minibatch, they are the same microbatches.
    other = varying_profile([layer("a")], [LINEAR], SAMPLES, "buckets", size)
    assert Counter(drawn(other, 7)) == Counter(by_order["buckets"])


def test_given_samples_make_consecutive_microbatches() -> None:
    profile = varying_profile([layer("a")], [LINEAR], [3, 9, 50, 20, 8, 1, 77], "given", 2)
    assert drawn(profile) == [9, 50, 8]


def test_expected_costs_are_means_over_the_microbatches() -> None:
    layers = [layer("a", 2.0, 4.0, output_bytes=1000, saved_bytes=500), layer("b", 1.0, 3.0)]
    degree = DegreeCosts(
        source="measured",
        degree=2,
        forward_s=(1.0, 1.0),
        backward_s=(2.0, 2.0),
        update_s=(0.0, 0.0),
        accumulate_s=(0.0, 0.0),
        workspace_bytes=(0, 0),
        update_workspace_bytes=(0, 0),
        weight_bytes=(0, 0),
        gradient_bytes=(0, 0),
        optimizer_bytes=(0, 0),
        buffer_bytes=(0, 0),
        saved_bytes=(500, 0),
        forward_reduced_bytes=(10**6, 0),
        backward_reduced_bytes=(0, 0),
        forward_reduces=(1, 0),
        backward_reduces=(0, 0),
    )
    whole = varying_profile(layers, [LINEAR, QUADRATIC], SAMPLES, "random", 4)
    whole = whole.model_copy(update={"tensor": (degree,), "tokens_per_sample": 100})
    mean = expected(whole)
    linear, quadratic = (
        fmean(cost_at(each, length) for length in drawn(whole)) for each in (LINEAR, QUADRATIC)
    )
    assert mean.layers[0].forward_s == pytest.approx(2 * linear)
    assert mean.layers[1].backward_s == pytest.approx(3 * quadratic)
    assert mean.tensor is not None
    assert mean.tensor[0].forward_s == pytest.approx((linear, quadratic))
    assert mean.tensor[0].forward_reduced_bytes == (round(10**6 * linear), 0)
    assert mean.tokens_per_sample == mean_tokens(whole) == round(fmean(SAMPLES))
    # no length that varies
    assert mean_tokens(whole.model_copy(update={"tokens_per_sample": 7})) == 7
    # The longest decides memory.
    assert (mean.layers[0].saved_bytes, mean.layers[0].outputs) == (500, whole.layers[0].outputs)
    fixed = whole.model_copy(update={"lengths": None})
    assert expected(fixed) is fixed
