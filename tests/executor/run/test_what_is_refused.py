"""Whatever the way into training: what would train something else than the model file says is
refused first.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner.api.running import make_job, profile, train
from planner.errors import InputError, ModelFileError, PlannerError
from planner.executor.communication.gradients import WholeBucket
from planner.executor.run.agreement import check_loss
from planner.formats.plan import Plan
from planner.formats.profile import LossMean
from planner.model.spec import load_model_file
from planner.options.training import TrainArguments, TrainingOptions
from tests.executor.plans import make_plan, structural_profile

pytestmark = pytest.mark.usefixtures("warm_start")

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(
        nn.Embedding(11, 8{sparse}), nn.Flatten(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4)
    )

def example_batch(batch_size):
    return (torch.randint(0, 11, (batch_size, 4)),), torch.randint(0, 4, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

class SAM(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, (
            "Sharpness Aware Minimization requires closure, but it was not provided"
        )
        return closure()

OTHER = nn.Linear(3, 3)

def optimizer(parameters):
    return {optimizer}
"""
SGD = "torch.optim.SGD(parameters, lr=0.1)"


def written(folder: Path, optimizer: str = SGD, sparse: str = "") -> Path:
    path = folder / "net.py"
    path.write_text(
        MODEL.replace("{optimizer}", optimizer).replace("{sparse}", sparse), encoding="utf-8"
    )
    return path


def contrastive_plan(path: Path, schedule: str = "1f1b-flush", microbatches: int = 4) -> Plan:
    """As `plan price` makes it, of a loss that no shares of microbatches add up to."""
    made = structural_profile(path, 4).model_copy(update={"loss": LossMean(over="batch")})
    return make_plan(made, (1, 1), schedule, microbatches)


def test_a_loss_of_whole_batches_is_not_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    plan = contrastive_plan(path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    why = "into which 1f1b-flush splits a minibatch train on another loss"
    with pytest.raises(InputError, match=why) as error:
        make_job(path, plan, TrainArguments())
    assert "`accept_divided_loss`" in error.value.hint
    with pytest.raises(InputError, match=why):
        make_job(path, plan, TrainArguments(baseline="data-parallel"))
    with pytest.raises(InputError, match=why):
        planner.pipeline(plan, path)


def test_a_divided_loss_can_be_accepted(tmp_path: Path) -> None:
    path = written(tmp_path)
    plan = contrastive_plan(path)
    make_job(path, plan, TrainArguments(accept_divided_loss=True))
    # by `plan solve`
    accepted = plan.model_copy(update={"loss": LossMean(over="batch", accepted=True)})
    make_job(path, accepted, TrainArguments())
    make_job(path, contrastive_plan(path, "1f1b", 1), TrainArguments())


def test_a_loss_that_nobody_checked_is_worth_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = make_plan(
        structural_profile(written(tmp_path), 4), (1, 1), schedule="gpipe", microbatches=2
    )
    check_loss(plan.model_copy(update={"loss": LossMean(over="samples")}), TrainingOptions())
    check_loss(plan.model_copy(update={"loss": None, "microbatches": 1}), TrainingOptions())
    assert "is a mean over" not in caplog.text
    check_loss(plan.model_copy(update={"loss": None}), TrainingOptions())
    assert "is a mean over, so microbatches are weighted by their samples" in caplog.text


def test_sparse_gradients_are_not_averaged(tmp_path: Path) -> None:
    path = written(tmp_path, sparse=", sparse=True")
    made = structural_profile(path, 4)
    with pytest.raises(
        PlannerError, match=r"gradient of a weight of shape \(11, 8\) is sparse"
    ) as error:
        train(path, make_plan(made, (2, 1)), steps=4)
    assert error.value.exit_code == InputError.exit_code
    assert "sparse=False" in error.value.hint
    losses = train(path, make_plan(made, (1, 2)), steps=4).losses  # the hint's other way out
    assert len(losses) == 4


def test_what_else_fails_in_a_bucket_is_told_as_it_is() -> None:
    class Failing(WholeBucket):
        def _reduce(self, *_: object) -> None:
            raise RuntimeError("another reason")

    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="another reason"):
        Failing([parameter]).post(None)  # type: ignore[arg-type]


def test_an_optimizer_that_ignores_its_argument_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "torch.optim.SGD(OTHER.parameters(), lr=0.1)")
    with pytest.raises(
        ModelFileError, match=r"optimizer\(\) at .*net.py:\d+ returned an optimizer of other param"
    ):
        profile(path, batch_size=4, seconds=0.0)
    with pytest.raises(PlannerError, match="returned an optimizer of other parameters") as error:
        train(path, make_plan(structural_profile(path, 4), (1, 1)), steps=2)
    assert error.value.exit_code == InputError.exit_code


def test_an_optimizer_may_leave_parameters_out(tmp_path: Path) -> None:
    given = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    spec = load_model_file(written(tmp_path, "torch.optim.SGD(parameters[:1], lr=0.1)"))
    assert spec.optimizer(given).param_groups[0]["params"] == given[:1]


@pytest.mark.parametrize("optimizer", ["torch.optim.LBFGS(parameters)", "SAM(parameters, lr=0.1)"])
def test_optimizers_that_need_a_closure_are_refused(tmp_path: Path, optimizer: str) -> None:
    path = written(tmp_path, optimizer)
    with pytest.raises(ModelFileError, match=r"whose step\(\) needs a closure") as error:
        profile(path, batch_size=4, seconds=0.0)
    assert "torch.optim.AdamW" in error.value.hint
    with pytest.raises(PlannerError, match=r"whose step\(\) needs a closure") as failed:
        train(path, make_plan(structural_profile(path, 4), (1, 1)), steps=2)
    assert failed.value.exit_code == InputError.exit_code


def test_steps_and_epochs_are_not_both_counted(tmp_path: Path) -> None:
    path = written(tmp_path)
    plan = contrastive_plan(path, "1f1b", 1)
    with pytest.raises(InputError, match="`epochs` cannot be combined with `steps`"):
        make_job(path, plan, TrainArguments(steps=3, epochs=2))
