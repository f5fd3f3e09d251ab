"""A user's script under torchrun trains as `plan train` does, and as plain PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner.errors import InputError
from planner.formats.plan import Plan, save_plan
from planner.model.spec import load_model_file
from tests.executor import custom_loop_script, eager
from tests.executor.models import write_model
from tests.executor.plans import in_groups, make_plan, structural_profile
from tests.executor.rounds import Weights, delayed_rounds

SAMPLES = 30
TIMEOUT_S = 240


def launched(
    workers: int, *arguments: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={workers}",
        *arguments,
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path.cwd()),
    }
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment,
        cwd=folder,
    )


def run_script(folder: Path, workers: int) -> list[dict[str, dict[str, list[float | None]]]]:
    """Run the script; return what each worker reports."""
    process = launched(workers, custom_loop_script.__file__, str(folder))
    assert process.returncode == 0, process.stdout + process.stderr
    return [
        json.loads((folder / f"report-{rank}.json").read_text("utf-8")) for rank in range(workers)
    ]


def make_memory_plan(folder: Path) -> Plan:
    """Make a plan for the model that the script builds."""
    source = """
import torch
from torch import nn
def build_model():
    return nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    )
def example_batch(size):
    return torch.randn(size, 6), torch.randn(size, 1)
loss = nn.functional.mse_loss
"""
    path = folder / "memory.py"
    path.write_text(source, encoding="utf-8")
    return make_plan(structural_profile(path, 4), (1, 1), "1f1b-flush", 2)


FAILING = """
import os, sys, threading, torch, torch.distributed as dist, planner
def block(*_):  # as NCCL's groups do after an error
    threading.Event().wait()
dist.ProcessGroup.abort = dist.ProcessGroup.shutdown = dist.destroy_process_group = block
plan = planner.load_plan("asynchronous.plan")
try:
    with planner.pipeline(plan, "language_momentum.py") as pipeline:
        for step in range(1000):
            if step == 5 and os.environ["RANK"] == "1":
                raise KeyError("the script's own")
            pipeline.step(planner.load_model_file("language_momentum.py").example_batch(4))
except BaseException as error:
    print("caught", type(error).__name__, flush=True)
    raise
"""


FEEDING = """
import sys, torch, planner
plan = planner.load_plan(sys.argv[1])
spec = planner.load_model_file("experts alone_momentum.py")
losses = []
with planner.pipeline(plan, "experts alone_momentum.py", seed=3) as pipeline:
    for step in range(4):
        torch.manual_seed(step)
        losses.append(pipeline.step(spec.functions["example_batch"](8)))
print("losses", losses, flush=True)
"""


@pytest.mark.slow
def test_ranks_that_divide_experts_take_their_samples_of_what_a_loop_feeds(tmp_path: Path) -> None:
    path = write_model(tmp_path, "experts alone", "momentum")
    (tmp_path / "script.py").write_text(FEEDING, encoding="utf-8")
    alone = make_plan(structural_profile(path, 2), (1,), "1f1b-flush", 4)
    group = in_groups(make_plan(structural_profile(path, 4), (1,), "1f1b-flush", 2), 2)
    losses = []
    for plan, workers in ((alone, 1), (group.model_copy(update={"by_samples": True}), 2)):
        save_plan(plan, tmp_path / "own.plan")
        process = launched(workers, "script.py", "own.plan", folder=tmp_path)
        assert process.returncode == 0, process.stdout + process.stderr
        told = [
            line.partition(" ")[2]
            for line in process.stdout.splitlines()
            if line.startswith("losses")
        ]
        assert len(set(told)) == 1, "all ranks know the whole loss"
        losses.append(json.loads(told[0]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_a_custom_loop_that_fails_ends_with_the_cause_whatever_blocks(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=SAMPLES)
    save_plan(make_plan(structural_profile(path, 4), (1, 1)), tmp_path / "asynchronous.plan")
    (tmp_path / "script.py").write_text(FAILING, encoding="utf-8")
    done = launched(2, "script.py", folder=tmp_path)
    assert done.returncode == 1
    assert "caught KeyError" in done.stdout, done.stderr
    told = (
        "worker 1 (stage 1), while running the script's own code: KeyError: \"the script's "
        'own" (script.py:11)\n'
    )
    assert done.stderr.count(told) == 1, done.stderr
    assert done.stderr.index(told) < done.stderr.index("Traceback")


def test_a_custom_loop_trains_as_plain_pytorch(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=SAMPLES)
    profile = structural_profile(path, 4)
    flush, asynchronous = make_plan(profile, (1, 1), "1f1b-flush", 2), make_plan(profile, (1, 1))
    save_plan(flush, tmp_path / "flush.plan")
    save_plan(asynchronous, tmp_path / "asynchronous.plan")
    save_plan(make_memory_plan(tmp_path), tmp_path / "memory.json")
    first, last = run_script(tmp_path, 2)
    assert first == last, "all workers know the same losses"
    spec = load_model_file(path)

    model = eager.build(spec)
    losses = eager.train(spec, model, eager.minibatches(spec, 8, 1))
    seen = last["flush"]["returned"]
    changes = custom_loop_script.CHANGES
    assert [seen[changes], seen[-1]] == [seen[changes - 1], seen[-2]], "nothing is left to drain"
    assert (
        [*seen[:changes], *seen[changes + 1 : -1]]
        == last["flush"]["all"]
        == pytest.approx(losses, rel=1e-4)
    )
    eager.assert_close(torch.load(tmp_path / "flush.weights", weights_only=True), model)

    losses, expected = in_two_parts(path, asynchronous)
    assert last["asynchronous"]["all"] == losses
    returned = last["asynchronous"]["returned"]
    assert [returned[changes], returned[-1]] == [losses[changes - 1], losses[-1]], (
        "a drain knows them all"
    )
    assert returned[0] is None, "the first one is still in the pipeline"
    weights = torch.load(tmp_path / "asynchronous.weights", weights_only=True)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    assert_in_memory(torch.load(tmp_path / "memory.weights", weights_only=True))


def in_two_parts(path: Path, plan: Plan) -> tuple[list[float], Weights]:
    """Compute delayed updates whose delay begins anew after the drain, while SGD's momentum
    continues.
    """
    spec = load_model_file(path)
    model = eager.build(spec)
    batches = eager.minibatches(spec, 4, 1)
    names = eager.stage_names(structural_profile(path, 4), plan)
    kept: dict[str, torch.optim.Optimizer] = {}
    losses: list[float] = []
    weights: Weights = {}
    for part in (batches[: custom_loop_script.CHANGES], batches[custom_loop_script.CHANGES :]):

        def make_optimizer(parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = spec.optimizer(parameters)
            key = next(iter(parameters))
            if key in kept:
                optimizer.load_state_dict(kept[key].state_dict())
            kept[key] = optimizer
            return optimizer

        found, weights = delayed_rounds(
            model,
            names,
            (1, 1),
            [stage.in_flight for stage in plan.stages],
            make_optimizer,
            lambda model, minibatch, part=part: eager.loss_of(  # type: ignore[misc]
                spec, model, part[minibatch]
            ),
            len(part),
            lambda optimizer, parameters, count: optimizer.step(),
        )
        losses += found
        model.load_state_dict(weights)
    return losses, weights


def assert_in_memory(weights: Weights) -> None:
    """Train the script's model without a pipeline."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        inputs, target = (
            torch.randn(8, 6, generator=generator),
            torch.randn(8, 1, generator=generator),
        )
        optimizer.zero_grad()
        for half in (slice(4), slice(4, 8)):
            torch.autograd.backward(nn.functional.mse_loss(model(inputs[half]), target[half]) / 2)
        optimizer.step()
    eager.assert_close(weights, model)


def test_outside_of_torchrun_there_is_no_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    path = write_model(tmp_path, "language", "sgd")
    with pytest.raises(InputError, match="the environment has no RANK"):
        planner.pipeline(make_plan(structural_profile(path, 4), (1, 1)), path)
