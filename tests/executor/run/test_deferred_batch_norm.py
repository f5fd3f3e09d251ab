"""Running statistics of whole minibatches, against BatchNorms and plain sums without microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.errors import InputError
from planner.formats.plan import Plan
from planner.model.options import ModuleOptions
from planner.model.spec import load_model_file
from planner.options.training import TrainArguments, TrainingOptions
from tests.executor import eager
from tests.executor.models import DATASET
from tests.executor.plans import make_plan, structural_profile

# The first layer normalises the data itself, so its statistics do not depend on the weights.
MODEL = """
import torch
from torch import nn

class Net(nn.Sequential):
    pass

def build_model():
    return Net(
        nn.BatchNorm2d(2, momentum=MOMENTUM),
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3, affine=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(27, 8),
        nn.BatchNorm1d(8, momentum=0.3),
        nn.Linear(8, 4),
    )

def example_batch(batch_size):
    return 3 + 2 * torch.randn(batch_size, 2, 5, 5), torch.randint(0, 4, (batch_size,))

loss = nn.functional.cross_entropy

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
BLOCKS = """
def blocks(model):
    return list(model)
"""
BATCH_SIZE, SAMPLES, EPOCHS = 4, 46, 2  # 3 microbatches: minibatches of 12, the last of 10
DEFERRED = TrainingOptions(deferred_batch_norm=True)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def write(folder: Path, *, blocks: bool = False) -> Path:
    """Write the model, captured or as blocks; then the first layer's statistics are means over all minibatches."""
    path = folder / ("blocks.py" if blocks else "captured.py")
    source = MODEL.replace("MOMENTUM", "None" if blocks else "0.1") + (BLOCKS if blocks else "")
    path.write_text(source + DATASET.replace("SAMPLES", str(SAMPLES)), encoding="utf-8")
    return path


def plan_of(path: Path, schedule: str, replicas: tuple[int, ...], recompute: tuple[int, ...]) -> Plan:
    """Make a plan of 3 microbatches; `recompute` says which stages recompute."""
    chunks = 2 if schedule == "interleaved" else 1
    plan = make_plan(structural_profile(path, BATCH_SIZE), replicas, schedule, 3, chunks=chunks)
    stages = (s.model_copy(update={"recompute": index in recompute}) for index, s in enumerate(plan.stages))
    return plan.model_copy(update={"stages": tuple(stages)})


def whole_statistics(path: Path) -> dict[str, Tensor]:
    """Return the statistics of the first layer, given whole minibatches."""
    spec = load_model_file(path)
    norm = eager.build(spec).get_submodule("0")
    for batch in eager.minibatches(spec, 3 * BATCH_SIZE, EPOCHS):
        norm(batch.args[0])
    return {f"0.{name}": norm.get_buffer(name) for name in STATISTICS}


def divided_statistics(path: Path) -> dict[str, Tensor]:
    """Return the statistics of all layers in plain training by microbatches, computed from their joined inputs."""
    spec = load_model_file(path)
    model = eager.build(spec)
    norms = {name: m for name, m in model.named_modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))}
    seen: dict[str, list[Tensor]] = {name: [] for name in norms}
    for name, norm in norms.items():
        norm.register_forward_hook(lambda _, inputs, __, name=name: seen[name].append(inputs[0].detach()))
    means = {name: torch.zeros(norm.num_features) for name, norm in norms.items()}
    variances = {name: torch.ones(norm.num_features) for name, norm in norms.items()}
    optimizer = spec.optimizer(list(model.parameters()))
    batches = eager.minibatches(spec, 3 * BATCH_SIZE, EPOCHS)
    for count, batch in enumerate(batches, start=1):
        optimizer.zero_grad()
        for part in batch.split(3):
            torch.autograd.backward(eager.loss_of(spec, model, part) * (part.size / batch.size))
        optimizer.step()
        for name, norm in norms.items():
            whole = torch.cat(seen[name]).transpose(0, 1).flatten(1)
            factor = 1 / count if norm.momentum is None else norm.momentum
            means[name] += factor * (whole.mean(1) - means[name])
            variances[name] += factor * (whole.var(1) - variances[name])
            seen[name].clear()
    counts = {f"{name}.num_batches_tracked": torch.tensor(len(batches)) for name in norms}
    means = {f"{name}.running_mean": mean for name, mean in means.items()}
    return means | {f"{name}.running_var": variance for name, variance in variances.items()} | counts


@pytest.mark.parametrize(
    ("replicas", "cases"),
    [
        pytest.param((1, 1), [("1f1b-flush", (0, 1), True), ("gpipe", (), False), ("2bw", (0,), False)], id="1-1"),
        pytest.param((2, 1), [("1f1b-flush", (), False), ("2bw", (1,), True)], id="2-1"),
        pytest.param((1, 1), [("zb-h1", (), False), ("2bw", (1,), True)], id="1-1 others", marks=pytest.mark.slow),
        pytest.param((1, 2), [("gpipe", (1,), False), ("zb-h1", (), True)], id="1-2", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1), [("interleaved", (1, 2), b) for b in (0, 1)], id="two", marks=pytest.mark.slow),
    ],
)
def test_running_statistics_are_those_of_whole_minibatches(
    replicas: tuple[int, ...], cases: list[tuple[str, tuple[int, ...], bool]], tmp_path: Path
) -> None:
    """Run cases of schedule, stages that recompute, and whether the model has blocks."""
    paths = {blocks: write(tmp_path, blocks=blocks) for blocks in (False, True)}
    runs = [
        eager.Case(paths[bool(blocks)], plan_of(paths[bool(blocks)], schedule, replicas, again), DEFERRED, None, EPOCHS)
        for schedule, again, blocks in cases
    ]
    for (schedule, _, _), case, (_, weights) in zip(cases, runs, eager.run_cases(runs), strict=True):
        expected = whole_statistics(case.path)
        if schedule != "2bw":  # its updates are delayed, so the weights differ
            expected |= divided_statistics(case.path)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=f"{schedule} {name}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_stages_gather_them_too(tmp_path: Path) -> None:
    path = write(tmp_path)
    plan = make_plan(structural_profile(path, BATCH_SIZE, ModuleOptions(compiled=True)), (1, 1), "gpipe", 3)
    _, weights = eager.run_one(path, plan, DEFERRED, epochs=EPOCHS)
    for name, tensor in divided_statistics(path).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_the_independent_reference_is_batch_norm_on_whole_minibatches(tmp_path: Path) -> None:
    for blocks in (False, True):
        path = write(tmp_path, blocks=blocks)
        by_hand = divided_statistics(path)
        for name, tensor in whole_statistics(path).items():
            torch.testing.assert_close(by_hand[name], tensor)


def test_a_baseline_has_no_microbatches(tmp_path: Path) -> None:
    from planner.api.running import make_job

    path = write(tmp_path)
    with pytest.raises(InputError, match="`deferred_batch_norm` is for plans, not for data-parallel"):
        make_job(path, plan_of(path, "gpipe", (1, 1), ()), TrainArguments(options=DEFERRED, baseline="data-parallel"))
