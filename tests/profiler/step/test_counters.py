"""FLOPs per layer: against PyTorch's own counter, by hand, and the same measured and estimated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from planner.api.running import estimate
from planner.api.running import profile as measure
from planner.model.spec import load_model_file
from planner.profiler.step.counters import Counter, model_flops

CONVOLUTIONS = """
import pytest
import torch
from torch import nn
def build_model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
def example_batch(batch_size):
    return torch.randn(batch_size, 3, 8, 8), torch.zeros(batch_size, dtype=torch.int64)
def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""

TOKENS = """
import pytest
import torch
from torch import nn
def build_model():
    return nn.Sequential(
        nn.Embedding(10, 4), nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 10, bias=False)
    )
def example_batch(batch_size):
    tokens = torch.zeros(batch_size, 7, dtype=torch.int64)
    return tokens, tokens
def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""


def test_measured_and_estimated_profiles_count_what_pytorch_counts(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(CONVOLUTIONS)
    measured = measure(path, batch_size=2, seconds=0.0, repeats=1)
    estimated = estimate(path, batch_size=2, device="a100")
    counts = [(each.name, each.forward_flops, each.backward_flops) for each in measured.layers]
    assert counts == [
        (each.name, each.forward_flops, each.backward_flops) for each in estimated.layers
    ]
    spec = load_model_file(path)
    batch = spec.example_batch(2)
    assert spec.loss is not None
    with FlopCounterMode(display=False) as counter:
        loss = spec.loss(spec.build_model()(*batch.args), batch.target)
        loss.backward()  # type: ignore[no-untyped-call]
    assert measured.flops == counter.get_total_flops()
    forward = {name: ahead for name, ahead, _ in counts}
    assert forward["3"] == 2 * 2 * 4 * 36 * 5
    assert measured.tokens_per_sample is None


def test_an_estimate_counts_tokens_and_knows_its_devices_peak(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(TOKENS)
    estimated = estimate(path, batch_size=2, device="a100", dtype="bf16")
    assert estimated.tokens_per_sample == 7
    assert estimated.device.peak_flops_per_s == 312e12
    # A lookup is no product; the others take 6 FLOPs per weight and token (Kaplan et al. 2020).
    assert estimated.flops == 6 * 2 * 7 * (4 * 6 + 6 * 10)


def test_recomputed_scores_of_attention_do_not_count() -> None:
    query, key, value = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    counter = Counter()
    with counter:
        result = scaled_dot_product_attention(query, key, value, is_causal=True)
        assert counter.flops == 2 * (2 * 2 * 8 * 8 * 4)
        result.sum().backward()  # type: ignore[no-untyped-call]
    assert counter.flops == 3 * 2 * (2 * 2 * 8 * 8 * 4)


def test_recurrent_layers_count() -> None:
    layer, counter = nn.LSTM(3, 5), Counter()
    with counter:
        output, _ = layer(torch.randn(7, 2, 3, requires_grad=True))
        assert counter.flops == 2 * 7 * 2 * (20 * 3 + 20 * 5)
        output.sum().backward()
    assert counter.flops == 3 * 2 * 7 * 2 * (20 * 3 + 20 * 5)


def test_the_matrices_of_experts_count_for_their_own_rows() -> None:
    """Rows 0 to 2 meet the first expert's 4x8 matrix, rows 3 to 7 the second's; no row
    meets both.
    """
    tokens, experts = (
        torch.randn(8, 4, requires_grad=True),
        torch.randn(2, 4, 8, requires_grad=True),
    )
    ends, counter = torch.tensor([3, 8], dtype=torch.int32), Counter()
    by_hand = 2 * (3 * 4 * 8 + 5 * 4 * 8)
    with counter:
        output = torch.nn.functional.grouped_mm(tokens, experts, offs=ends)
        assert counter.flops == by_hand
        output.square().sum().backward()  # type: ignore[no-untyped-call]
    assert counter.flops == 3 * by_hand  # for the tokens' and the experts' gradients


@pytest.mark.parametrize(
    ("one", "other", "by_hand"),
    [
        ((8, 4), (2, 4, 6), 2 * (3 + 5) * 4 * 6),  # rows divided
        ((2, 7, 4), (4, 8), 2 * 7 * 4 * (3 + 5)),  # columns divided
        # the summed dimension divided, as for the weights' gradients
        ((6, 8), (8, 5), 2 * 6 * (3 + 5) * 5),
        ((2, 7, 4), (2, 4, 6), 2 * 2 * 7 * 4 * 6),  # a matrix for each
    ],
)
def test_products_of_groups_count(
    one: tuple[int, ...], other: tuple[int, ...], by_hand: int
) -> None:
    arguments = torch.empty(one, device="meta"), torch.empty(other, device="meta")
    assert model_flops(torch.ops.aten._grouped_mm.default, arguments, {}, None) == by_hand
