"""Draw the training losses of the Transformer in four stages: python -m benchmarks.convergence.curves.

Curves of `newest-muon`, as it was on 22 November 2026, are means of real runs (`links.py`), all others emulated
(`late.py`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import fmean

from benchmarks.convergence import late, links
from benchmarks.convergence.__main__ import DOCS
from benchmarks.convergence.picture import curves_svg

STAGES, MINIBATCHES = 4, 400
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
        if (case.model, case.stages, case.recipe.minibatches) == ("transformer", STAGES, MINIBATCHES):
            own = [each.curve for each in results if replace(each.case, seed=0) == case and each.curve]
            if case.recipe.optimizer in ("adamw", "newest-muon, by rows"):
                found[f"{case.recipe.optimizer}, {late.named(case)}"] += own
    for run in links.read():
        if run.case.whole and (run.case.stages, run.case.minibatches) == (STAGES, MINIBATCHES):
            found[f"{run.case.recipe.optimizer}, {run.case.contender}"].append(run.curve)
    points = {name: list(enumerate(zip(*own, strict=True)))[FIRST:] for name, own in sorted(found.items())}
    return {name: [(late.PART * (at + 1.0), fmean(losses)) for at, losses in own] for name, own in points.items()}


if __name__ == "__main__":
    main()
