"""Runs of two workers that move to plans in files, one after the other."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import planner
from planner.executor.checkpoint import handover
from planner.executor.run import drift_watch, move
from planner.executor.run.replan import Replanner
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan, load_plan, save_plan
from planner.formats.profile import Profile, save_profile
from planner.workers.job import TrainResult

WINDOW = 10
_MODEL = """
from pathlib import Path
import torch
from torch import nn
from benchmarks.testbed.replan.forced import force

WIDTH, BLOCKS = {width}, {blocks}
force(Path(__file__).parent)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(torch.tanh(self.linear(x)))

def build_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))

def example_batch(batch_size):
    return (torch.randn(batch_size, WIDTH),), torch.randn(batch_size, WIDTH)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.001)

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, number):
        drawn = torch.Generator().manual_seed(number)
        sample = torch.randn(WIDTH, generator=drawn)
        return sample, torch.randn(WIDTH, generator=drawn)

def dataset():
    return Samples()
"""


def force(folder: Path) -> None:
    """Let the runs of this process move to next-0.json in a folder, and so on; note in files who
    they are, and when they begin to move.
    """
    plans = [load_plan(path) for path in sorted(folder.glob("next-*.json"))]

    def settle(self: Replanner, end: int, samples_per_s: float) -> None:
        if len(self.moves) < len(plans) and not self._decided:
            self._settle(plans[len(self.moves)], end)

    Replanner.look = settle  # type: ignore[method-assign]
    drift_watch._LOOKS_EVERY_S = 0.05  # windows are short here
    if "RANK" not in os.environ:
        return
    with (folder / f"pid-{os.environ['RANK']}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    original = handover.hand_over

    def noted(*arguments: object) -> object:
        (folder / "moving").write_text(str(time.time()))
        return original(*arguments)  # type: ignore[arg-type]

    if not getattr(original, "notes", False):
        noted.notes = True  # type: ignore[attr-defined]
        vars(move)["hand_over"] = handover.hand_over = noted  # type: ignore[assignment]


@dataclass(frozen=True)
class Forced:
    """A model of equal blocks in a folder, and its plans before and after the move."""

    folder: Path
    profile: Profile
    before: Plan

    @classmethod
    def of(cls, folder: Path, width: int, blocks: int, moves: int = 1) -> Forced:
        """Write the model of two stages, half of the blocks in each, of which one moves and comes
        back.
        """
        path = folder / "model.py"
        path.write_text(
            _MODEL.replace("{width}", str(width)).replace("{blocks}", str(blocks)),
            encoding="utf-8",
        )
        (folder / "next.json").unlink(missing_ok=True)
        profile = _profiled(path)
        save_profile(profile, folder / "profile.json")
        half = blocks // 2
        before, after = (
            planner.price(
                profile,
                flat_cluster(2, 1e9),
                stages,
                schedule="1f1b-flush",
                microbatches=2,
            )
            for stages in ((half, blocks - half), (half + 1, blocks - half - 1))
        )
        for number in range(moves):
            save_plan((after, before)[number % 2], folder / f"next-{number}.json")
        return cls(folder, profile, before)

    def train(
        self, steps: int, *, every: int | None = None, moves: bool = True, hang_s: float = 60.0
    ) -> TrainResult:
        """Train, from the newest checkpoint if there are any."""
        resume = "auto" if every is not None else None
        return planner.train(
            self.folder / "model.py",
            self.before,
            steps=steps,
            drift_window=WINDOW,
            profile=str(self.folder / "profile.json"),
            replan=moves,
            checkpoint_every=every,
            checkpoint_folder=str(self.folder / "checkpoints"),
            resume=resume,
            hang_timeout_s=hang_s,
        )

    def process_ids(self) -> list[set[str]]:
        """Return the ids that the processes of each worker noted."""
        return [set((self.folder / f"pid-{rank}").read_text("utf-8").split()) for rank in range(2)]


def _profiled(path: Path) -> Profile:
    text = path.read_text("utf-8")
    quiet = path.with_name("profiled.py")
    quiet.write_text(text.replace("force(Path(__file__).parent)\n", ""), encoding="utf-8")
    return planner.profile(quiet, batch_size=2, device="cpu", seconds=2.0)
