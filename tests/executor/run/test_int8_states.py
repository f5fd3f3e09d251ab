"""AdamW with moments in 8 bits, as models by name have it: its update by its formula, stages and
replicas that share it as one process, runs that resume, and what is refused.
"""

from __future__ import annotations

import bisect
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.catalog.transformers_model import Int8AdamW, numbers_of_8_bits
from planner.formats.plan import Plan
from planner.model.elementwise import has_divisible_optimizer, is_elementwise, kept_whole
from planner.model.spec import load_model_file
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.workers.job import Job
from tests.executor.plain_training import one_process
from tests.executor.plans import make_plan, sharded, structural_profile
from tests.executor.processes import run_jobs

SIZE, SEED, STEPS = 4, 3, 5

# Weights of 4,096, 4,096 and 320 elements: two in 8 bits, and one in float32, as biases are.
MODEL = """
import torch
from torch import nn
from planner.catalog.transformers_model import Int8AdamW

def build_model():
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(64, 5))

def example_batch(batch_size):
    return (torch.randn(batch_size, 64),), torch.randn(batch_size, 5)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    return STATES
"""
IN_8_BITS = "Int8AdamW(parameters, lr=0.01)"
IN_FLOAT32 = "torch.optim.AdamW(parameters, lr=0.01)"


def model_file(folder: Path, states: str = IN_8_BITS) -> Path:
    path = folder / "model.py"
    path.write_text(MODEL.replace("STATES", states), encoding="utf-8")
    return path


def nearest(value: float, numbers: list[float]) -> float:
    place = bisect.bisect_left(numbers, value)
    return min(numbers[max(0, place - 1) : place + 1], key=lambda number: abs(number - value))


def test_numbers_are_finer_for_larger_values() -> None:
    """Of the largest decade half of all, then half as many in each below it."""
    signed, unsigned = numbers_of_8_bits(signed=True), numbers_of_8_bits(signed=False)
    assert len(set(signed)) == len(set(unsigned)) == 256
    assert signed[0] == pytest.approx(-0.99296875)
    assert signed[-1] == 1.0
    assert (unsigned[0], unsigned[-1]) == (0.0, 1.0)
    counts = [
        sum(10.0 ** (decade - 7) < number < 10.0 ** (decade - 6) for number in unsigned)
        for decade in range(7)
    ]
    assert counts == [2, 4, 8, 16, 32, 64, 128]
    assert [number for number in signed if number > 0][:-1] == [
        -number for number in reversed(signed) if number < 0
    ]


def test_the_update_is_adamws_with_moments_of_whole_blocks_in_8_bits() -> None:
    """Elements of two blocks in Python's arithmetic, each a multiple of its block's largest."""
    signed, unsigned = numbers_of_8_bits(signed=True), numbers_of_8_bits(signed=False)
    weight = nn.Parameter(torch.full((64, 64), 0.5))
    optimizer = Int8AdamW([weight], lr=0.1)
    shares = torch.linspace(0.3, 1, 256).repeat(16) * torch.arange(1, 17).repeat_interleave(256)
    watched = [0, 100, 255, 256, 300]
    expected = dict.fromkeys(watched, 0.5)
    means = dict.fromkeys(watched, 0.0)
    squares = dict.fromkeys(watched, 0.0)
    most_mean, most_square = [0.0] * 2, [0.0] * 2  # of each block
    for step, size in enumerate((0.3, -0.7, 1.1, 0.01), 1):
        weight.grad = (size * shares).view(64, 64)
        optimizer.step()

        for block in range(2):
            # the last element of a block is its largest, which 8 bits keep as it is
            gradient = size * (block + 1)
            most_mean[block] = 0.9 * most_mean[block] + 0.1 * gradient
            most_square[block] = 0.999 * most_square[block] + 0.001 * gradient**2
        for place in watched:
            gradient = size * float(shares[place])
            mean = 0.9 * means[place] + 0.1 * gradient
            square = 0.999 * squares[place] + 0.001 * gradient**2
            expected[place] -= 0.1 * 0.01 * expected[place]
            root = math.sqrt(square / (1 - 0.999**step)) + 1e-8
            expected[place] -= 0.1 * mean / (1 - 0.9**step) / root
            largest = abs(most_mean[place // 256]), most_square[place // 256]
            means[place] = nearest(mean / largest[0], signed) * largest[0]
            squares[place] = nearest(square / largest[1], unsigned) * largest[1]
            found = float(weight.detach().view(-1)[place])
            assert found == pytest.approx(expected[place], rel=1e-3)
        most_mean = [nearest(math.copysign(1, m), signed) * abs(m) for m in most_mean]

    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.uint8
    assert state["exp_avg_scale"].shape == state["exp_avg_sq_scale"].shape == (16,)


def test_small_and_odd_weights_keep_float32_and_train_as_adamw() -> None:
    torch.manual_seed(SEED)
    values = torch.randn(63, 63), torch.randn(65, 65)
    own = [nn.Parameter(value.clone()) for value in values]
    usual = [nn.Parameter(value.clone()) for value in values]
    optimizers = Int8AdamW(own, lr=0.01), torch.optim.AdamW(usual, lr=0.01)
    for _ in range(STEPS):
        for one, other in zip(own, usual, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(own, usual, strict=True):
        torch.testing.assert_close(one, other)
        assert optimizers[0].state[one]["exp_avg"].dtype == torch.float32


def test_parts_of_a_weight_are_updated_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(SEED)
    value, gradient = torch.randn(128, 64), torch.randn(128, 64)
    weights = []
    for part in (Int8AdamW.PART, 1024):
        monkeypatch.setattr(Int8AdamW, "PART", part)
        weight = nn.Parameter(value.clone())
        optimizer = Int8AdamW([weight], lr=0.01)
        for _ in range(STEPS):
            weight.grad = gradient.clone()
            optimizer.step()
        weights.append(weight.detach())
    assert torch.equal(*weights)


def test_estimates_have_two_bytes_and_two_scales_per_block(tmp_path: Path) -> None:
    spec = load_model_file(str(model_file(tmp_path)))
    assert has_divisible_optimizer(spec, spec.build_model())
    profile = estimate_profile(spec, SIZE, EstimateOptions("h100"))
    sizes = [layer.optimizer_bytes for layer in profile.layers if layer.optimizer_bytes]
    step, bias = 4, 8 * 64
    of_weights = 2 * 4096 + 2 * 4 * 4096 // 256
    assert sizes == [
        of_weights + bias + 2 * step,
        of_weights + bias + 2 * step,
        8 * (320 + 5) + 2 * step,
    ]
    assert sum(layer.update_s for layer in profile.layers) > 0


def test_replicas_keep_large_weights_whole_and_ranks_cut_none(tmp_path: Path) -> None:
    spec = load_model_file(str(model_file(tmp_path)))
    model = spec.build_model()
    optimizer = spec.optimizer(list(model.parameters()))
    assert not is_elementwise(optimizer)
    whole = kept_whole(optimizer)
    assert whole is not None
    assert [each.numel() for each in whole] == [4096, 4096]


@pytest.mark.usefixtures("warm_start")
def test_stages_and_replicas_train_as_one_process(tmp_path: Path) -> None:
    """To the bit where each minibatch is one batch; replicas add their gradients otherwise. A run
    that stops and resumes is the same to the bit.
    """
    path = model_file(tmp_path)
    profile = structural_profile(path, SIZE)
    in_stages = make_plan(profile, (1, 1), "1f1b-flush", 1)
    in_replicas = sharded(make_plan(profile, (2,), "1f1b-flush", 2))
    jobs = [
        job_of(path, tmp_path, "stages", in_stages, STEPS),
        job_of(path, tmp_path, "replicas", in_replicas, STEPS),
        job_of(path, tmp_path, "stopped", in_replicas, 3),
        job_of(path, tmp_path, "stopped", in_replicas, STEPS, resume="auto"),
    ]
    run_jobs(jobs, tmp_path)
    stages, replicas, _, resumed = (
        torch.load(str(job.save_weights), weights_only=True) for job in jobs
    )

    for name, weight in one_process(path, SIZE, 1, SEED, STEPS).named_parameters():
        assert torch.equal(stages[name], weight.detach()), name
    for name, weight in one_process(path, SIZE, 2, SEED, STEPS).named_parameters():
        torch.testing.assert_close(replicas[name], weight.detach(), rtol=2e-2, atol=2e-3)
        assert torch.equal(resumed[name], replicas[name]), name


def job_of(
    path: Path, folder: Path, name: str, plan: Plan, steps: int, resume: str | None = None
) -> Job:
    checkpoints = {"checkpoint_folder": str(folder / name), "checkpoint_every": 3}
    if resume is not None:
        checkpoints["resume"] = resume
    return Job.model_validate(
        {
            "model": str(path),
            "plan": plan,
            "steps": steps,
            "seed": SEED,
            "save_weights": str(folder / f"{name}-{steps}.pt"),
            "checkpoints": checkpoints,
        }
    )
