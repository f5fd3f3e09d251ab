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
from planner.analysis.compare_runs import compare_runs
from planner.analysis.explain import Explanation
from planner.analysis.sweep import Sweep
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.formats.timeline import Timeline
from planner.report.page.data import chart_data
from planner.report.page.elements import paragraph
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
from planner.simulator.summary import Summary, summarize
from planner.version import __version__

SCRIPTS = ("axis.js", "timeline.js", "memory.js", "page.js")
Section = tuple[str, str, str]  # anchor, title, HTML


@dataclass(frozen=True)
class ReportContent:
    """What a report is made of; it leaves out what is None.

    `why_not`: why there is no comparison, explanation and sweep. `source`: of the profile's times, "estimated" or so.
    """

    plan: Plan
    simulated: Timeline
    measured: Timeline | None = None
    comparison: Comparison | None = None
    sweep: Sweep | None = None
    why_not: str = ""
    explanation: Explanation | None = None
    source: str = ""


def report_page(content: ReportContent) -> str:
    """Write the page; raise InputError if the measured run is of another plan."""
    plan, summary = content.plan, summarize(content.simulated)
    runs = [run for run in (content.simulated, content.measured) if run is not None]
    sections = _sections(content, runs, summary)
    return fill(
        "page.html",
        {
            "title": escape(f"{plan.model}: {short_config(plan.config)}"),
            "heading": escape(
                f"{plan.model}: {short_config(plan.config)} on {plan.workers} GPU{'s' * (plan.workers > 1)}"
            ),
            "lead": escape(f"{schedule_line(plan)} · {cluster_line(plan.cluster)}"),
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


def _sections(content: ReportContent, runs: list[Timeline], summary: Summary) -> list[Section]:
    plan = content.plan
    run = None if content.measured is None else compare_runs(plan, content.simulated, content.measured)
    measured = None if run is None else run.measured
    sections = [("summary", "Summary", figures(plan, summary, measured))]
    if run is not None:
        sections.append(("measured", "Predicted and measured", measured_section(plan, run)))
    sections += [
        ("limits", "Bottleneck", limits_section(plan, summary, content.explanation)),
        ("stages", "Stages", stages_section(plan, content.source)),
    ]
    shown = shown_workers(content.simulated)
    sections.append(("timeline", "Timeline", fill("timeline.html", timeline_section(content.simulated, runs, shown))))
    sections.append(("memory", "Memory", memory_section(plan, summary, measured)))
    if content.comparison is not None:
        sections.append(("comparison", "Compared with other plans", comparison_section(content.comparison)))
    if content.sweep is not None:
        sections.append(("sweep", "At other bandwidths", sweep_section(content.sweep)))
    if content.why_not:
        sections.append(("missing", "Not in this report", paragraph(content.why_not, "note")))
    return sections


def fill(name: str, values: dict[str, str]) -> str:
    """Fill the `{{ places }}` of a part."""
    return re.sub(r"\{\{ (\w+) \}\}", lambda place: values[place[1]], _part(name))


def _part(name: str) -> str:
    return files("planner.report.page").joinpath("html").joinpath(name).read_text(encoding="utf-8")
