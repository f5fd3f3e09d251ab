"""The tables of runs beside their simulations, and of compiled stages; the runs themselves take minutes."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.compiled.__main__ import report as compiled_report
from benchmarks.timeline.__main__ import DRAWN, EMULATED, REAL, picture, report, row
from planner.analysis.compare_runs import compare_runs
from planner.simulator.recorded import simulate_recorded
from planner.simulator.simulate_plan import simulate
from tests.simulator.plans import equal_layers, plan_of


def test_a_row_and_a_picture() -> None:
    plan = plan_of(equal_layers(2), (1, 1))
    measured = simulate(plan, 2 * DRAWN).model_copy(update={"source": "measured"})
    simulated = simulate_recorded(plan, measured)
    text = report([row(REAL[0], compare_runs(plan, simulated, measured))])
    assert "| vgg16 1f1b | real, 2 workers |" in text
    assert "1 of 1 runs at the plan's times, 1 at the run's own" in text
    titles = ElementTree.fromstring(picture(simulated, measured)).iter("{http://www.w3.org/2000/svg}title")
    forwards = [each.text for each in titles if each.text is not None and "forward" in each.text]
    assert len(forwards) == 2 * 2 * DRAWN


def test_runs_are_told_apart_by_their_names() -> None:
    names = [case.name for case in (*REAL, *EMULATED)]
    assert len(set(names)) == len(names)


def test_the_table_of_compiled_stages() -> None:
    seconds = {"uncompiled_s": 0.3, "whole_s": 0.2, "runs_s": 0.21, "layers_s": 0.2}
    errors = {"2": [0.01, -0.02], "3": [0.0, 0.0, 0.03], "4": [0.0, 0.01, 0.02, -0.05]}
    text = compiled_report([{"model": "vgg16", **seconds, "errors": errors}])
    assert "+1.0%, -2.0%" in text
    assert "9 stages: median error 1.0%, worst 5.0%" in text
