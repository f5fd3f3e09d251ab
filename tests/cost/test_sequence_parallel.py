"""Groups that divide by tokens what each of their ranks would compute whole."""

from __future__ import annotations

import pytest

from planner.cost.network.link import Link
from planner.cost.tensor import profile_at
from tests.samples import layer, profile
from tests.solver.test_degrees import divided


def test_what_every_rank_would_do_is_divided() -> None:
    norm = layer("norm", forward_s=4.0, backward_s=8.0, saved_bytes=400, output_bytes=100)
    product = layer("product", forward_s=4.0, backward_s=8.0, saved_bytes=400, output_bytes=100)
    product = product.model_copy(update={"forward_flops": 1})
    model = divided(profile(norm, product), 4)
    (costs,) = model.tensor or ()
    # Each of four ranks takes as long as one device for the norm. The products' results are summed, in a second and a
    # half.
    halves = {"forward_s": (4.0, 1.0), "backward_s": (8.0, 2.0), "saved_bytes": (400, 250)}
    counts = dict.fromkeys(("forward_reduces", "backward_reduces"), (0, 1))
    counts |= dict.fromkeys(("forward_reduced_bytes", "backward_reduced_bytes"), (0, 100))
    weights = {"weight_bytes": tuple(each.weight_bytes for each in model.layers)}
    model = model.model_copy(update={"tensor": (costs.model_copy(update=halves | counts | weights),)})
    plain, by_tokens = (profile_at(model, 4, Link(100.0), sequence_parallel=flag) for flag in (False, True))
    assert [each.forward_s for each in plain.layers] == pytest.approx([4.0, 2.5])
    assert [each.forward_s for each in by_tokens.layers] == pytest.approx([1.0, 2.5])
    assert [each.backward_s for each in by_tokens.layers] == pytest.approx([2.0, 3.5])
    assert [each.saved_bytes for each in by_tokens.layers] == [100, 100]
    assert [each.outputs[0].output_bytes for each in plain.layers] == [100, 100]
    assert [each.outputs[0].output_bytes for each in by_tokens.layers] == [25, 25]
