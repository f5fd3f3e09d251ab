"""AdamW with moments in bfloat16, as models by name have it: its update by its formula, and stages
and replicas that share it as one process.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.catalog.transformers_model import Bfloat16AdamW
from planner.model.elementwise import has_divisible_optimizer
from planner.model.spec import load_model_file
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.workers.job import Job
from tests.executor.plain_training import one_process
from tests.executor.plans import make_plan, sharded, structural_profile
from tests.executor.processes import run_jobs

SIZE, SEED, STEPS = 4, 3, 5

MODEL = """
import torch
from torch import nn
from planner.catalog.transformers_model import Bfloat16AdamW

def build_model():
    first, second = nn.Linear(6, 16), nn.Linear(16, 16)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(16, 3))

def example_batch(batch_size):
    return (torch.randn(batch_size, 6),), torch.randn(batch_size, 3)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    return STATES
"""
IN_BFLOAT16 = "Bfloat16AdamW(parameters, lr=0.01)"
IN_FLOAT32 = "torch.optim.AdamW(parameters, lr=0.01)"


def model_file(folder: Path, states: str = IN_BFLOAT16) -> Path:
    path = folder / "model.py"
    path.write_text(MODEL.replace("STATES", states), encoding="utf-8")
    return path


def test_the_update_is_adamws_with_rounded_moments() -> None:
    """One number, in Python's arithmetic, whose moments are rounded to 8 binary digits."""
    weight = nn.Parameter(torch.tensor([0.5]))
    optimizer = Bfloat16AdamW([weight], lr=0.1)
    expected, mean, square = 0.5, 0.0, 0.0
    for step, gradient in enumerate((0.3, -0.7, 1.1, 0.01), 1):
        weight.grad = torch.tensor([gradient])
        optimizer.step()

        exact_mean = 0.9 * mean + 0.1 * gradient
        exact_square = 0.95 * square + 0.05 * gradient**2
        expected -= 0.1 * 0.01 * expected
        root = math.sqrt(exact_square / (1 - 0.95**step)) + 1e-8
        expected -= 0.1 * exact_mean / (1 - 0.9**step) / root
        mean = float(torch.tensor(exact_mean).bfloat16())
        square = float(torch.tensor(exact_square).bfloat16())
        assert float(weight.detach()) == pytest.approx(expected, rel=1e-5)

    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert float(state["exp_avg"]) == pytest.approx(mean, rel=1e-2)


def test_estimates_have_half_the_states(tmp_path: Path) -> None:
    def optimizer_bytes(states: str) -> int:
        spec = load_model_file(str(model_file(tmp_path, states)))
        assert has_divisible_optimizer(spec, spec.build_model())
        profile = estimate_profile(spec, SIZE, EstimateOptions("h100"))
        return sum(layer.optimizer_bytes for layer in profile.layers)

    assert optimizer_bytes(IN_BFLOAT16) == pytest.approx(optimizer_bytes(IN_FLOAT32) / 2, rel=0.01)


@pytest.mark.usefixtures("warm_start")
def test_stages_and_replicas_train_as_one_process(tmp_path: Path) -> None:
    """To the bit where each minibatch is one batch; replicas add their gradients otherwise."""
    path = model_file(tmp_path)
    profile = structural_profile(path, SIZE)
    plans = [
        make_plan(profile, (1, 1), "1f1b-flush", 1),
        sharded(make_plan(profile, (2,), "1f1b-flush", 2)),
    ]
    jobs = [
        Job(
            model=str(path),
            plan=plan,
            steps=STEPS,
            seed=SEED,
            save_weights=str(tmp_path / f"{number}.pt"),
        )
        for number, plan in enumerate(plans)
    ]
    run_jobs(jobs, tmp_path)
    in_stages, in_replicas = (torch.load(str(job.save_weights), weights_only=True) for job in jobs)

    for name, weight in one_process(path, SIZE, 1, SEED, STEPS).named_parameters():
        assert torch.equal(in_stages[name], weight.detach()), name
    for name, weight in one_process(path, SIZE, 2, SEED, STEPS).named_parameters():
        torch.testing.assert_close(in_replicas[name], weight.detach(), rtol=2e-2, atol=2e-3)
