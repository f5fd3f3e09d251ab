"""The parts of the benchmark of convergence that need no training."""

from __future__ import annotations

import pytest
import torch

from benchmarks.convergence import characters, digits, transformer
from benchmarks.convergence.__main__ import make_plan
from benchmarks.convergence.emulation import lateness


def test_held_out_text_is_not_trained_on() -> None:
    trained, held_out = characters.dataset(), characters.evaluation_dataset()
    assert len(trained) > 15 * len(held_out) > 1000  # type: ignore[arg-type]
    inputs, target = held_out[0]
    assert torch.equal(inputs[1:], target[:-1])
    assert int(inputs.max()) < characters.CHARACTERS
    assert digits.MINIBATCHES % digits.EVERY == 0


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "interleaved"])
def test_plans_have_four_stages(schedule: str) -> None:
    plan = make_plan(digits, schedule)
    assert len(plan.stages) == 4
    assert plan.workers == (2 if schedule == "interleaved" else 4)


def test_every_stage_has_parameters() -> None:
    model = transformer.build_model()
    stages = {transformer.stage_of(name, 4) for name, _ in model.named_parameters()}
    assert stages == {0, 1, 2, 3}
    assert lateness("1f1b", 4) == [3, 2, 1, 0]
