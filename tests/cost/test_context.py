"""Context parallelism: what layers cost whose sequences ranks divide, and plans with it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import planner
from planner.cost.context import with_context
from planner.cost.network.link import Link
from planner.cost.tensor import costs_at, profile_at
from planner.errors import InputError, ProfileError
from planner.formats.cluster import hierarchical_cluster
from planner.formats.plan_parts import config_words
from planner.formats.profile import Edge, Layer, Profile
from planner.plan.trainable import check_trainable
from planner.solver import search_plan
from tests.samples import layer, profile

KEYS = 600  # bytes, and as many of values
ATTENTION_S = 12.0
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.q, self.k, self.v, self.o = (nn.Linear(512, 512) for _ in range(4))
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        h = self.norm(x)
        heads = [p(h).unflatten(-1, (8, 64)).transpose(1, 2) for p in (self.q, self.k, self.v)]
        a = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 512)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(512, 1000)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(x)

def build_model():
    return Model()

def example_batch(size):
    tokens = torch.zeros(size, TOKENS, dtype=torch.long)
    return (tokens,), tokens

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)
"""


def attending(blocks: int = 1, saved_bytes: int = 1000) -> Profile:
    """Layers q, k, v, attention and output, again and again; keys and values are of `KEYS` each."""
    layers: list[Layer] = [layer("x", 1.0, 2.0, output_bytes=2400)]
    edges = []
    before = "x"
    for number in range(blocks):
        names = {part: f"{part}{number}" for part in "qkvao"}
        layers += [
            layer(names["q"], 1.0, 2.0, output_bytes=2400, weight_bytes=80),
            layer(names["k"], 1.0, 2.0, output_bytes=KEYS, weight_bytes=20),
            layer(names["v"], 1.0, 2.0, output_bytes=KEYS, weight_bytes=20),
            layer(
                names["a"], ATTENTION_S, 2 * ATTENTION_S, output_bytes=2400, saved_bytes=saved_bytes
            ).model_copy(update={"op": "aten.scaled_dot_product_attention"}),
            layer(names["o"], 1.0, 2.0, output_bytes=2400, weight_bytes=80, saved_bytes=2400),
        ]
        edges += [(before, names[part]) for part in "qkv"]
        edges += [(names[part], names["a"]) for part in "qkv"] + [(names["a"], names["o"])]
        before = names["o"]
    return profile(*layers, edges=edges, microbatch_size=1)


def ring_s(compute_s: float, received_bytes: float, context: int, bandwidth: float) -> float:
    """Step through a ring: while a rank attends to one part, the next one arrives."""
    step_s = compute_s / context
    message_s = received_bytes / context / bandwidth
    return sum(max(step_s, message_s) for _ in range(context - 1)) + step_s


@pytest.mark.parametrize("context", [2, 4, 8])
@pytest.mark.parametrize("bandwidth", [50.0, 150.0, 1e6])
def test_attention_takes_as_long_as_a_ring_of_steps(context: int, bandwidth: float) -> None:
    model = with_context(attending(), (context,))
    divided = profile_at(model, context, Link(bandwidth_bytes_per_s=bandwidth))
    attention = divided.layers[4]
    forward_s = ring_s(ATTENTION_S / context, 2 * KEYS, context, bandwidth)
    backward_s = ring_s(2 * ATTENTION_S / context, 4 * KEYS, context, bandwidth)
    assert attention.forward_s == pytest.approx(forward_s, rel=2e-3)
    assert attention.backward_s == pytest.approx(backward_s, rel=2e-3)


def test_ranks_have_a_part_of_all_but_weights() -> None:
    whole = attending()
    divided = profile_at(with_context(whole, (4,)), 4, Link(bandwidth_bytes_per_s=1e9))
    for before, after in zip(whole.layers, divided.layers, strict=True):
        assert after.forward_s == pytest.approx(before.forward_s / 4, rel=1e-3)
        assert after.saved_bytes * 4 == before.saved_bytes
        assert (after.weight_bytes, after.gradient_bytes) == (
            before.weight_bytes,
            before.gradient_bytes,
        )
        assert [value.output_bytes * 4 for value in after.outputs] == [
            value.output_bytes for value in before.outputs
        ]


def test_groups_sum_the_gradients_of_all_weights_once_per_update() -> None:
    bandwidth = 100.0
    divided = profile_at(with_context(attending(), (4,)), 4, Link(bandwidth_bytes_per_s=bandwidth))
    summed_s = sum(each.update_s for each in divided.layers)
    assert summed_s == pytest.approx(2 * 3 / 4 * 200 / bandwidth)


def test_ranks_that_divide_layers_halve_messages_of_both_kinds(tmp_path: Path) -> None:
    """A group of eight, four parts of a sequence times two parts of a layer: keys of half of the
    heads, and all-reduces of a quarter of the tokens between two ranks.
    """
    file = tmp_path / "model.py"
    file.write_text(MODEL.replace("TOKENS", "1024"))
    measured = planner.estimate(file, batch_size=1, device="a100-80gb", tensor=(2,))
    both = costs_at(with_context(measured, (4,), (1, 2)), 8)
    two = costs_at(measured, 2)
    four = costs_at(with_context(measured, (4,)), 4)
    assert both.context == four.context == 4
    for number, each in enumerate(measured.layers):
        sent = 2 * 7 / 8 * both.forward_reduced_bytes[number]
        if "attention" in each.op:
            assert sent == pytest.approx(2 * 3 / 4 * four.forward_reduced_bytes[number] / 2, abs=2)
        else:
            assert sent == pytest.approx(2 * 1 / 2 * two.forward_reduced_bytes[number] / 4, abs=2)


def test_a_quarter_of_the_tokens_costs_what_an_estimate_of_so_few_says(tmp_path: Path) -> None:
    """All but attention, whose quarter of the queries looks at all keys."""
    estimates = []
    for tokens in (8192, 2048):
        file = tmp_path / f"model{tokens}.py"
        file.write_text(MODEL.replace("TOKENS", str(tokens)))
        estimates.append(planner.estimate(file, batch_size=1, device="a100-80gb", host="graphs"))
    whole, short = estimates
    costs = costs_at(with_context(whole, (4,)), 4)
    for number, each in enumerate(short.layers):
        if "attention" not in each.op:
            assert costs.saved_bytes[number] == pytest.approx(each.saved_bytes, rel=0.02, abs=64)
    others = [n for n, each in enumerate(short.layers) if "attention" not in each.op]
    divided_s = sum(costs.forward_s[number] for number in others)
    assert divided_s == pytest.approx(sum(short.layers[n].forward_s for n in others), rel=0.25)


def test_long_sequences_are_divided_where_whole_ones_do_not_fit() -> None:
    model = attending(blocks=2, saved_bytes=100_000)
    cluster = hierarchical_cluster((4, 2), (1e6, 1e5), memory_bytes=80_000)
    plan = search_plan(with_context(model, (4,)), cluster, schedule="1f1b-flush", microbatches=8)
    assert plan.context == 4
    assert all(degree == 4 for degree in plan.degrees)
    assert all(plan.memory_bytes(stage) <= 80_000 for stage in range(len(plan.stages)))
    assert planner.simulate(plan).microbatch_size == 1
    assert type(plan).model_validate_json(plan.model_dump_json()) == plan
    assert "each sharded over 4 ranks (context parallelism)" in str(plan)

    check_trainable(plan)
    torchtitan = planner.export(named(plan), "torchtitan")
    assert "context_parallel_degree=4" in torchtitan
    assert "tensor_parallel_degree=1" in torchtitan
    assert "--context-parallel-size 4" in planner.export(named(plan), "megatron")


def named(plan: planner.Plan) -> planner.Plan:
    """Return the plan with layers called as those of a transformer."""
    numbers = iter(range(100))
    stages = tuple(
        stage.model_copy(update={"layers": tuple(f"h.{next(numbers)}.mlp" for _ in stage.layers)})
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages})


def test_what_cannot_be_priced_is_refused(tmp_path: Path) -> None:
    without = profile(layer("a", output_bytes=8), layer("b"))
    with pytest.raises(ProfileError, match="no layer of 'sample' is scaled_dot_product_attention"):
        with_context(without, (2,))
    file = tmp_path / "model.py"
    file.write_text(MODEL.replace("TOKENS", "64"))
    with pytest.raises(InputError, match="`context=2` and `tensor=2` both make groups"):
        planner.estimate(file, device="a100-80gb", context=(2,), tensor=(2,))


def test_edges_without_gradients_are_no_keys() -> None:
    """A mask that enters attention is not passed on."""
    model = attending()
    mask = layer("mask", output_bytes=10**6, gradient=False)
    masked = model.model_copy(
        update={
            "layers": (mask, *model.layers),
            "edges": (*model.edges, Edge(source="mask", value="mask", target="a0")),
        }
    )
    plain = costs_at(with_context(model, (2,)), 2)
    assert costs_at(with_context(masked, (2,)), 2).forward_reduced_bytes[1:] == (
        plain.forward_reduced_bytes
    )


def test_fit_divides_long_sequences_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL.replace("TOKENS", "65536"))
    ask = partial(planner.fit, file, 8, gpu="a10g", minibatch=32, time_limit_s=40.0)
    asked = ask(context=(4,)).asked
    assert asked.plan is not None
    assert asked.plan.context == 4
    whole = ask(context=(1,)).asked
    assert whole.plan is None or whole.plan.context is None


def test_words_of_a_single_stage_tell_both_kinds_of_ranks_apart() -> None:
    words = [config_words("2x8", 4), config_words("1x4", 4), config_words("2x8"), config_words("8")]
    assert words == ["DP=2 TP=2 CP=4", "CP=4", "DP=2 TP=8", "DP=8"]
