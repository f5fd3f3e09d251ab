"""Draw and run the pipeline example of DeepSpeed's tutorial. See README.md in this folder.

python -m benchmarks.published.deepspeed_example --save
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.kept import ROOT, Results
from benchmarks.testbed.predict import balanced_stages, given_plan
from planner.api.running import estimate, train
from planner.executor.run.data import make_batches
from planner.formats.cluster import flat_cluster
from planner.formats.files import write_text
from planner.formats.plan import Plan
from planner.model.spec import load_model_file
from planner.reporting.svg import timeline_svg
from planner.schedule.instructions import Unit
from planner.simulator.simulate_plan import simulate

HERE = Path(__file__).parent
MODEL = HERE / "model.py"
PICTURE = ROOT / "docs" / "images" / "deepspeed-example.svg"
MICROBATCHES, MICROBATCH_SIZE = 8, 16
LINK = 12e9  # bytes/s, for the picture
SEED = 1


@dataclass(frozen=True)
class Compared:
    """A run of the plan compared with one of the unsplit model.

    Attributes:
        steps: minibatches.
        first_loss: of the plan's run.
        last_loss: at the end of the plan's run.
        loss_difference: largest difference between the two runs over all minibatches.
        weight_difference: largest final difference of a weight, relative to the largest change of a
            weight.
    """

    steps: int
    first_loss: float
    last_loss: float
    loss_difference: float
    weight_difference: float


def main() -> None:
    """Draw, run, compare, and save if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=64, help="minibatches to train (default: %(default)s)"
    )
    parser.add_argument(
        "--save", action="store_true", help="write the picture, results.json and the page in docs/"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plan = example_plan()
    results = Results(HERE, save=arguments.save)
    results.add("run", "example", compare(plan, arguments.steps))
    if arguments.save:
        write_text(PICTURE, timeline_svg([simulate(plan, minibatches=1)]))
    picture = f"![Two pipelines of two stages, eight microbatches](images/{PICTURE.name})"
    results.show(tables(results), picture)


def example_plan() -> Plan:
    """Return two stages of equal time, each on two workers, and eight microbatches; workers 0 and 2
    are a pipeline.
    """
    profile = estimate(MODEL, device="v100", batch_size=MICROBATCH_SIZE)
    stages = balanced_stages(profile, 2)
    return given_plan(
        profile, flat_cluster(4, LINK), stages, (2, 2), "1f1b-flush", MICROBATCHES, "published"
    )


def compare(plan: Plan, steps: int) -> Compared:
    """Train with the plan in four processes, and unsplit in this one, on the CPU: any device
    computes the same.
    """
    plan = plan.model_copy(update={"device": plan.device.model_copy(update={"kind": "cpu"})})
    with tempfile.TemporaryDirectory(prefix="deepspeed-") as folder:
        weights = Path(folder) / "weights.pt"
        result = train(MODEL, plan, steps=steps, seed=SEED, save_weights=weights)
        trained = torch.load(weights, weights_only=True)
    losses, initial, expected = unsplit(steps)
    found = [one.loss for one in result.losses]
    assert len(found) == steps
    assert all(loss is not None for loss in found)
    change = max(float((expected[name] - initial[name]).abs().max()) for name in expected)
    return Compared(
        steps=steps,
        first_loss=found[0] or 0.0,
        last_loss=found[-1] or 0.0,
        loss_difference=max(
            abs((one or 0.0) - other) for one, other in zip(found, losses, strict=True)
        ),
        weight_difference=max(
            float((trained[name] - expected[name]).abs().max()) for name in expected
        )
        / change,
    )


def unsplit(steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train with plain PyTorch on whole minibatches; return the losses, and the weights before and
    after.
    """
    spec = load_model_file(MODEL)
    torch.manual_seed(SEED)
    model = spec.build_model()
    initial = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = make_batches(spec, MICROBATCH_SIZE, MICROBATCHES, SEED)
    losses = []
    for step in range(steps):
        parts = [data.batch(Unit(step, microbatch)) for microbatch in range(MICROBATCHES)]
        points = torch.cat([part.args[0] for part in parts])
        classes = torch.cat([part.target for part in parts])
        loss = torch.nn.functional.cross_entropy(model(points), classes)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, initial, {name: value.detach() for name, value in model.named_parameters()}


def tables(results: Results) -> str:
    """Return the results in Markdown."""
    headers = (
        "minibatches",
        "first loss",
        "last loss",
        "largest difference of a loss",
        "of a weight, over its change",
    )
    rows = [
        [
            f"{one.steps}",
            f"{one.first_loss:.4f}",
            f"{one.last_loss:.4f}",
            f"{one.loss_difference:.1e}",
            f"{one.weight_difference:.1e}",
        ]
        for one in results.records("run", Compared).values()
    ]
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    return f"Four processes against the unsplit model in one ({results.about('run')}):\n\n{table}"


if __name__ == "__main__":
    main()
