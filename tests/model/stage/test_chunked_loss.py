"""A head and a cross entropy in chunks of tokens, beside the same chunks written by hand and beside
the loss of all tokens.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.capture.graph import LayerGraph
from planner.model.stage.chunked_loss import UnchunkedLossError, head_and_loss
from planner.model.stage.parts import Variant
from planner.model.stage.stage import StageModule, build_stage

WORDS, WIDTH, LENGTH, SAMPLES, CHUNKS = 50, 16, 7, 3, 4
Loss = Callable[[Tensor, Tensor], Tensor]


class Speaker(nn.Module):
    """An embedding, a layer and a head, whose weight may be the embedding's."""

    def __init__(self, *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return what the head takes, [samples, length, width]."""
        states: Tensor = self.block(self.embedding(tokens))
        return states

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(tokens))
        return logits


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), labels.flatten())


def some_ignored(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)


def smooth(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.float().reshape(-1, WORDS)
    return F.cross_entropy(rows, labels.flatten(), ignore_index=3, label_smoothing=0.1)


def of_weighted_classes(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, WORDS)
    rows = logits.view(-1, WORDS)
    return F.cross_entropy(rows, labels.flatten(), weight, ignore_index=3, label_smoothing=0.1)


def of_weighted_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.view(-1, WORDS), labels.flatten(), reduction="none")
    return (losses.view(-1, LENGTH) * torch.linspace(0, 1, LENGTH)).mean()


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.view(-1, WORDS)
    return F.cross_entropy(rows, labels.flatten(), reduction="sum") / labels.numel()


def shifted_and_capped(logits: Tensor, labels: Tensor) -> Tensor:
    """The next token's, as models of transformers compute it, of logits that Gemma caps."""
    capped = torch.tanh(logits / 5.0) * 5.0
    rows = capped[..., :-1, :].contiguous().float().view(-1, WORDS)
    return F.cross_entropy(rows, labels[..., 1:].reshape(-1))


LOSSES = (
    mean,
    some_ignored,
    smooth,
    of_weighted_classes,
    of_weighted_tokens,
    summed,
    shifted_and_capped,
)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(6, (SAMPLES, LENGTH), generator=generator)
    return Batch((tokens,), {}, labels)


def graph_of(model: nn.Module, loss: Loss) -> LayerGraph:
    return capture(model, batch(), loss)


def stage_of(graph: LayerGraph, variant: Variant) -> StageModule:
    return build_stage(graph, [layer.name for layer in graph.layers], variant=variant)


def gradients(stage: StageModule) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the batch, and the gradients of the stage's weights."""
    stage.zero_grad()
    loss = stage(batch(), {})["loss"]
    loss.backward()
    taken = {name: each.grad for name, each in stage.named_parameters() if each.grad is not None}
    return loss.detach(), {name: gradient.clone() for name, gradient in taken.items()}


@pytest.mark.parametrize(
    ("loss", "tied", "bias"),
    [(loss, tied, not tied) for loss, tied in itertools.product(LOSSES, (False, True))],
)
def test_chunks_give_the_loss_of_all_tokens(loss: Loss, tied: bool, bias: bool) -> None:
    torch.manual_seed(0)
    graph = graph_of(Speaker(tied=tied, bias=bias), loss)

    whole = gradients(stage_of(graph, Variant()))
    chunked = gradients(stage_of(graph, Variant(loss_chunks=CHUNKS)))

    torch.testing.assert_close(chunked[0], whole[0])
    torch.testing.assert_close(chunked[1], whole[1])


def test_chunks_written_by_hand_are_equal_to_the_bit() -> None:
    torch.manual_seed(0)
    model = Speaker(tied=True)
    loss, ours = gradients(stage_of(graph_of(model, some_ignored), Variant(loss_chunks=CHUNKS)))

    model.zero_grad()
    (tokens,), labels = batch().args, batch().target.flatten()
    rows = model.hidden(tokens).reshape(-1, WIDTH)
    losses = [
        F.cross_entropy(F.linear(part, model.head.weight), its, ignore_index=3, reduction="none")
        for part, its in zip(rows.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)
    ]
    by_hand = torch.cat(losses).sum() / (labels != 3).sum()
    by_hand.backward()

    assert torch.equal(loss, by_hand.detach())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(ours[name], parameter.grad), name


def test_no_more_than_the_logits_of_a_chunk_exist() -> None:
    """4,096 words and 1,024 tokens of 32 numbers: 16.8 MB of logits, and as much for each further
    value of their size.
    """
    words, width, tokens = 4096, 32, 1024
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, words, bias=False))
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(tokens, width, generator=generator)
    labels = torch.randint(words, (tokens,), generator=generator)
    rows_and_labels = Batch((rows,), {}, labels)
    graph = capture(model, rows_and_labels, F.cross_entropy)

    def peak_bytes(chunks: int) -> int:
        stage = stage_of(graph, Variant(loss_chunks=chunks))
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        stage.zero_grad(set_to_none=False)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            stage(rows_and_labels, {})["loss"].backward()
        return most_allocated(measured)

    whole, in_eight = peak_bytes(1), peak_bytes(8)

    logits_bytes = tokens * words * 4
    assert whole > 2 * logits_bytes
    assert in_eight < whole / 3
    assert in_eight < logits_bytes


def most_allocated(measured: profile) -> int:
    """Return the most bytes that PyTorch held at once, besides those at the start."""
    results: Any = measured.profiler
    held = most = 0
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def other_reader(logits: Tensor, labels: Tensor) -> Tensor:
    """PaLM's z-loss."""
    return mean(logits, labels) + 1e-4 * torch.logsumexp(logits, -1).square().mean()


def by_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), F.one_hot(labels.flatten(), WORDS).float())


def classes_first(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def normalised(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(F.layer_norm(logits, (LENGTH, WORDS)), labels)


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().mean() + 0 * labels.sum()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (other_reader, "aten.logsumexp.default reads the logits, too"),
        (by_probabilities, "is not one of rows of logits and a label for each"),
        (classes_first, "is not one of rows of logits and a label for each"),
        (normalised, "is aten.layer_norm.default, which may need all logits"),
        (squares, "the graph has 0 operations cross_entropy, not one"),
    ],
)
def test_what_needs_all_logits_is_refused(loss: Loss, why: str) -> None:
    graph = graph_of(Speaker(), loss)

    with pytest.raises(UnchunkedLossError, match=re.escape(why)):
        head_and_loss(graph)
    with pytest.raises(UnchunkedLossError, match=re.escape(why)):
        stage_of(graph, Variant(loss_chunks=CHUNKS))


def test_a_head_in_an_earlier_stage_is_refused() -> None:
    graph = graph_of(Speaker(), mean)
    *_, loss = [layer.name for layer in graph.layers]

    with pytest.raises(UnchunkedLossError, match="its head, in layer 'head', is in an earlier"):
        build_stage(graph, [loss], variant=Variant(loss_chunks=CHUNKS))


@pytest.mark.parametrize("groups", [(("block.0", "block.1", "head"),), (("head", "loss"),)])
def test_recomputed_layers_change_nothing(groups: tuple[tuple[str, ...], ...]) -> None:
    """A group without the loss leaves the head to the chunks; one with both has them in it."""
    torch.manual_seed(0)
    graph = graph_of(Speaker(tied=True), shifted_and_capped)
    plain = gradients(stage_of(graph, Variant(loss_chunks=CHUNKS)))

    recomputing = Variant(loss_chunks=CHUNKS, recompute=groups)
    again = gradients(stage_of(graph, recomputing))

    assert torch.equal(again[0], plain[0])
    for name, gradient in plain[1].items():
        assert torch.equal(again[1][name], gradient), name


@pytest.mark.slow  # the compiler takes half a minute
@pytest.mark.filterwarnings("ignore")  # of what the compiler imports
def test_a_compiled_stage_has_the_same_chunks() -> None:
    """They run as PyTorch runs them, behind what is compiled, which rounds otherwise."""
    torch.manual_seed(0)
    graph = graph_of(Speaker(tied=True), smooth)
    plain = gradients(stage_of(graph, Variant(loss_chunks=CHUNKS)))

    compiled = gradients(stage_of(graph, Variant(compiled=True, loss_chunks=CHUNKS)))

    torch.testing.assert_close(compiled[0], plain[0])
    torch.testing.assert_close(compiled[1], plain[1])
