"""Draw the training losses of the Transformer in four stages: python -m
benchmarks.convergence.curves.

They are means of the trainings of `late.py`: of AdamW as it usually is, and of what the docs
recommend.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import fmean

from benchmarks.convergence import late
from benchmarks.convergence.__main__ import DOCS
from benchmarks.convergence.picture import curves_svg

STAGES, MINIBATCHES = 4, 400
SHOWN = {("adamw", None), ("newest-muon, by rows", 0.1)}
FIRST = 2  # points left out, because losses fall from 5 to 3 in the warm-up


def main() -> None:
    """Write the picture into the docs."""
    picture = curves_svg(f"Transformer in {STAGES} stages: training loss", curves())
    (DOCS / "late-transformer.svg").write_text(picture, encoding="utf-8")


def curves() -> dict[str, list[tuple[float, float]]]:
    """Return the curves by name."""
    results = late.read()
    found: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    for case in late.best(results):
        setting = (
            case.stages,
            case.recipe.minibatches,
            case.synchronous_start,
            case.late_lr,
        )
        if (
            setting == (STAGES, MINIBATCHES, 0.0, 0.0)
            and (case.recipe.optimizer, case.clip) in SHOWN
        ):
            own = [
                each.curve for each in results if replace(each.case, seed=0) == case and each.curve
            ]
            found[f"{case.recipe.optimizer}, {late.named(case)}"] += own
    points = {
        name: list(enumerate(zip(*own, strict=True)))[FIRST:] for name, own in sorted(found.items())
    }
    return {
        name: [(late.PART * (at + 1.0), fmean(losses)) for at, losses in own]
        for name, own in points.items()
    }


if __name__ == "__main__":
    main()
