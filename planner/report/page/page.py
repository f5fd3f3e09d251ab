"""The report: one HTML file that needs nothing else, not even a network.

Puts together the parts in `html/`. All text goes through `escape`; the charts' data is JSON in a script element of its
own, and the page's content security policy forbids it to load anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from planner.analysis.compare import Comparison
from planner.analysis.compare_runs import lay_over
from planner.analysis.sweep import Sweep
from planner.formats.plan import Plan
from planner.formats.timeline import Timeline
from planner.report.page.data import chart_data
from planner.report.page.sections import (
    comparison_section,
    figures,
    limits_section,
    measured_section,
    memory_section,
    stages_section,
    sweep_section,
    timeline_section,
)
from planner.report.svg.lanes import shown_workers
from planner.report.tables.plan import cluster_line, schedule_line
from planner.simulator.summary import summarize
from planner.version import __version__

SCRIPTS = ("axis.js", "timeline.js", "memory.js", "page.js")


@dataclass(frozen=True)
class Content:
    """What a report is made of; what is None is left out of it.

    `why_not`: says why there is no comparison and no sweep, where there is none.
    """

    plan: Plan
    simulated: Timeline
    measured: Timeline | None = None
    comparison: Comparison | None = None
    sweep: Sweep | None = None
    why_not: str = ""


def report_page(content: Content) -> str:
    """The page.

    Raises:
        InputError: when the measured run is one of another plan.
    """
    plan, runs = content.plan, [content.simulated]
    summary, measured = summarize(content.simulated), None
    sections = [
        ("summary", "In short", figures(plan, summary)),
        ("limits", "What limits it", limits_section(plan, summary)),
        ("stages", "Stages", stages_section(plan)),
    ]
    if content.measured is not None:
        runs.append(content.measured)
        against = lay_over(plan, content.simulated, content.measured)
        measured = against.measured
        sections.append(("measured", "Predicted and measured", measured_section(plan, against)))
    shown = shown_workers(content.simulated)
    sections.append(("timeline", "Timeline", fill("timeline.html", timeline_section(content.simulated, runs, shown))))
    sections.append(("memory", "Memory", memory_section(plan, summary, measured)))
    if content.comparison is not None:
        sections.append(("comparison", "Beside other ways", comparison_section(content.comparison)))
    if content.sweep is not None:
        sections.append(("sweep", "With other bandwidths", sweep_section(content.sweep)))
    if content.why_not:
        sections.append(("missing", "Not in this report", f'<p class="note">{escape(content.why_not)}</p>'))
    lead = f"{schedule_line(plan)} · {cluster_line(plan.cluster)}"
    return fill(
        "page.html",
        {
            "title": escape(f"{plan.model}: {plan.config}"),
            "heading": f"{escape(plan.model)}: {escape(plan.config)} on {plan.workers} GPU{'s' * (plan.workers > 1)}",
            "lead": escape(lead),
            "contents": " ".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections),
            "sections": "\n".join(
                f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{title}</h2>\n{body}\n'
                "</section>"
                for name, title, body in sections
            ),
            "footer": escape(
                f"plan {__version__} · profile {plan.profile_digest} on {plan.device.name} · "
                f"{plan.solver.name}, {plan.solver.status} · cost model {plan.solver.cost_model}"
            ),
            "style": _part("page.css"),
            "script": "\n".join(map(_part, SCRIPTS)),
            "data": chart_data(runs, summary),
        },
    )


def fill(name: str, values: dict[str, str]) -> str:
    """The part of that name, its `{{ places }}` filled."""
    return re.sub(r"\{\{ (\w+) \}\}", lambda place: values[place[1]], _part(name))


def _part(name: str) -> str:
    return files("planner.report.page").joinpath("html").joinpath(name).read_text(encoding="utf-8")
