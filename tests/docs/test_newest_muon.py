"""NewestMuon against an exact orthogonalisation, PyTorch's AdamW and PyTorch's Muon."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from docs.examples.newest_muon import NewestMuon, is_table, orthogonal


class Small(nn.Module):
    """One of everything: a table, equal and unequal matrices, a convolution, norms and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(
            nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(24, 8)
        )
        self.look_back = nn.Conv1d(8, 8, 3, padding=1)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (samples, length) to (samples, length, 11)."""
        x: Tensor = self.blocks(self.embedding(tokens))
        scores: Tensor = self.head(self.norm(x + self.look_back(x.mT).mT))
        return scores


def _set_gradients(model: nn.Module, seed: int) -> None:
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()  # type: ignore[no-untyped-call]


def _matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        n: p
        for n, p in model.named_parameters()
        if p.ndim >= 2 and n.startswith(("blocks", "look_back"))
    }


def _squares(matrix: Tensor, dimensions: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values, which one matrix of three squares has, one by one."""
    rows, columns = matrix.shape
    split = {(8, 24): 1, (24, 8): 0}.get((rows, columns)) if dimensions == 2 else None
    return (matrix,) if split is None else matrix.chunk(3, split)


def test_matrices_move_along_the_singular_vectors_of_the_mixed_gradient() -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = NewestMuon(
        model.named_parameters(), lr=0.01, average=0.9, newest=0.5, weight_decay=0.1
    )
    averages = {name: torch.zeros_like(parameter) for name, parameter in _matrices(model).items()}
    for step in range(3):
        _set_gradients(model, step)
        before = {name: parameter.detach().clone() for name, parameter in _matrices(model).items()}
        gradients = {
            name: parameter.grad.clone()  # type: ignore[union-attr]
            for name, parameter in _matrices(model).items()
        }
        optimizer.step()
        for name, parameter in _matrices(model).items():
            averages[name] = 0.9 * averages[name] + 0.1 * gradients[name]
            mixed = (0.5 * gradients[name] + 0.5 * averages[name]).flatten(1).double()
            update = (before[name] * (1 - 0.01 * 0.1) - parameter.detach()).flatten(1).double()
            pieces = [_squares(each, parameter.ndim) for each in (mixed, update)]
            for piece, moved in zip(*pieces, strict=True):
                left, _, right = torch.linalg.svd(piece, full_matrices=False)
                side = len(piece) if parameter.ndim == 2 else max(piece.shape)
                inside = left.mT @ moved @ right.mT / (0.01 * 0.4 * math.sqrt(side))
                # Five iterations bring singular values that are not tiny to about 1, and turn no
                # singular vector.
                assert torch.allclose(
                    inside - inside.diag().diag(), torch.zeros_like(inside), atol=2e-3
                )
                assert inside.diag()[:4].min() > 0.6
                assert inside.diag().max() < 1.25


def test_the_rest_is_updated_as_by_adamw_to_the_bit() -> None:
    torch.manual_seed(0)
    ours = Small()
    theirs = copy.deepcopy(ours)
    others = [p for n, p in theirs.named_parameters() if n not in _matrices(theirs)]
    optimizer = NewestMuon(ours.named_parameters(), lr=0.01, vectors=0.5)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.ndim > 1]},
        {"params": [p for p in others if p.ndim == 1], "lr": 0.005},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.0, 0.98), weight_decay=0.0)
    for step in range(3):
        _set_gradients(ours, step)
        gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
        for name, parameter in theirs.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
        adamw.step()
    for name, parameter in ours.named_parameters():
        if name not in _matrices(ours):
            assert torch.equal(parameter, theirs.get_parameter(name)), name


def test_with_a_newest_share_of_one_minus_the_average_it_is_muon() -> None:
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        pytest.skip("torch.optim.Muon is there from PyTorch 2.9 on")
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    theirs = copy.deepcopy(ours)
    optimizer = NewestMuon(
        ours.named_parameters(), lr=0.01, average=0.95, newest=0.05, weight_decay=0.1
    )
    # Its factor for the size of an update is half of ours; weights decay by rate times decay.
    # It sizes updates by the longer side, we by the rows.
    shares = [math.sqrt(len(each) / max(each.shape)) for each in theirs.parameters()]
    groups = [
        {"params": [each], "lr": 0.02 * share, "weight_decay": 0.05 / share}
        for each, share in zip(theirs.parameters(), shares, strict=True)
    ]
    reference = muon(groups, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    before = copy.deepcopy(ours)
    for _ in range(4):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
    for one, other, first in zip(
        ours.parameters(), theirs.parameters(), before.parameters(), strict=True
    ):
        moved = (other - first).norm()
        assert (one - other).norm() / moved < 0.02  # PyTorch's iterates in bfloat16


def test_batches_of_matrices_are_orthogonalised_one_by_one() -> None:
    torch.manual_seed(0)
    for shape in ((5, 12, 7), (5, 7, 12), (2, 1, 9)):
        matrices = torch.randn(shape)
        together = orthogonal(matrices)
        alone = torch.cat([orthogonal(matrix[None]) for matrix in matrices])
        assert torch.allclose(together, alone, atol=1e-5)
    assert torch.equal(orthogonal(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))


def test_a_matrix_has_one_buffer_and_gradients_may_be_missing() -> None:
    model = Small()
    optimizer = NewestMuon(model.named_parameters())
    _set_gradients(model, 0)
    model.look_back.weight.grad = model.head.bias.grad = None
    kept = model.look_back.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.look_back.weight, kept)
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert states["look_back.weight"] == states["head.bias"] == {}
    assert {
        name: len(state) for name, state in states.items() if name in _matrices(model) and state
    } == dict.fromkeys([f"blocks.{i}.weight" for i in range(4)], 1)
    assert states["blocks.0.weight"]["average"].shape == (8, 8)


def test_its_update_can_be_estimated() -> None:
    with FakeTensorMode():
        model = Small()
        optimizer = NewestMuon(model.named_parameters())
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        for _ in range(2):
            optimizer.step()


def test_state_survives_saving_and_loading() -> None:
    torch.manual_seed(0)
    one = Small()
    first = NewestMuon(one.named_parameters(), lr=0.01)
    _set_gradients(one, 0)
    first.step()
    other = copy.deepcopy(one)
    second = NewestMuon(other.named_parameters(), lr=1.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, optimizer in ((one, first), (other, second)):
        _set_gradients(model, 1)
        optimizer.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("embed_tokens.weight", True),
        ("transformer.wte.weight", True),
        ("wpe.weight", True),
        ("bert.embeddings.position_embeddings.weight", True),
        ("pos_embed", True),
        ("lm_head.weight", True),
        ("classifier.weight", True),
        ("token_embedding.weight", True),
        ("layers.0.attn.q_proj.weight", False),
        ("layers.0.mlp.down_proj.weight", False),
        ("transformer.h.0.mlp.c_fc.weight", False),
        ("layers.3.heads_mix.weight", False),
        ("features.0.weight", False),
        ("encoder.layer.1.output.dense.weight", False),
    ],
)
def test_embeddings_and_heads_are_recognised_by_name(name: str, table: bool) -> None:
    assert is_table(name, nn.Parameter(torch.empty(2, 2))) is table


def test_numbers_outside_their_range_are_refused() -> None:
    parameters = list(nn.Linear(2, 2).named_parameters())
    with pytest.raises(ValueError, match=r"newest is 1\.5; it must be from 0 to 1"):
        NewestMuon(parameters, newest=1.5)
    with pytest.raises(ValueError, match=r"lr is -1; it must be 0 or more"):
        NewestMuon(parameters, lr=-1)
