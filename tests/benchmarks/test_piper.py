"""The formulas of Piper's program say of its plans what it printed."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu_truth.rows import ANCHORS, anchors
from benchmarks.piper.formulas import Formulas, PiperStage


@pytest.mark.skipif(not ANCHORS.exists(), reason="the published answers are not here")
def test_formulas_say_what_the_program_printed() -> None:
    checked = 0
    for run in anchors("piper.json")["runs"]:
        if not run["feasible"] or run["input"] != "bert32a100":
            continue
        graph = json.loads((ANCHORS / "piper-inputs" / f"{run['input']}.json").read_text(encoding="utf-8"))
        stages = [
            PiperStage(frozenset(each["nodes"]), each["dp"], each["tp"], frozenset(each["recomputed"]))
            for each in run["stages"]
        ]
        formulas = Formulas(graph, run["bandwidth"], run["microbatches"])
        assert formulas.seconds(stages) == pytest.approx(run["tps"], rel=1e-5)
        assert formulas.memory_bytes(stages) <= run["memory_bytes"]
        checked += 1
    assert checked == 25
