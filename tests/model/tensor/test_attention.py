"""Attention with the same dropout on every rank is PyTorch's attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from planner.model.tensor.group import attention_with_noise

SHARE = 0.25


@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_a_query_that_may_attend_to_nothing_gets_zeros(kind: str) -> None:
    """As the first tokens of sequences that are padded on the left."""
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[:, 0] = False
    if kind == "added":
        mask = torch.zeros(4, 4).masked_fill(~mask, -torch.inf)
    tensors = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
    q, k, v = tensors

    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=SHARE)
    torch.manual_seed(0)
    noise = F.dropout(torch.ones(1, 2, 4, 4), SHARE)
    made = attention_with_noise(q, k, v, mask, noise, is_causal=False, scale=None, enable_gqa=False)

    torch.testing.assert_close(made, expected)
    assert not made[:, :, 0].any()
    found = torch.autograd.grad(made.square().sum(), tensors)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), tensors))
