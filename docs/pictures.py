"""Draw the pictures of the explanation and of the report: python docs/pictures.py [--report]

All are the product's own, of VGG-16 as measured in profiles/vgg16/cpu.json. Only those of the report need a browser
(the system's Chromium, through playwright), and pillow to make them small.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from io import BytesIO
from pathlib import Path

import planner
from planner.analysis.explain import ResourceUse, explain
from planner.cli.main import main as plan_command
from planner.reporting.svg import OKABE_ITO, Font, box, document, line, profile_svg, text, timeline_svg
from planner.units import format_seconds

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
FILE = ROOT / "profiles" / "vgg16" / "cpu.json"
PROFILE = planner.load_profile(FILE)
GBPS = 125e6  # bytes/s
SCHEDULES = ("1f1b", "1f1b-flush", "gpipe")
SECONDS_SHOWN = 2.0  # of each schedule, from its start
BLUE, GREEN = OKABE_ITO[0], OKABE_ITO[2]


def resources(uses: tuple[ResourceUse, ...], seconds: float) -> str:
    """Draw a bar for each device and link: how long it is busy per minibatch, and the time that a minibatch takes."""
    left, width, height = 170, 900, 24
    scale = (width - left - 160) / seconds
    bottom = 48 + height * len(uses)
    orange = Font(12, fill=OKABE_ITO[1])
    parts = [
        text(8, 22, "VGG-16, 2-1-1 on 4 devices at 1 Gbit/s: busy seconds per minibatch", Font(15)),
        line((left + seconds * scale, 34), (left + seconds * scale, bottom), OKABE_ITO[1], "5 4"),
        text(left + seconds * scale + 6, bottom, f"{format_seconds(seconds)} per minibatch", orange),
    ]
    for row, use in enumerate(uses):
        y = 40 + height * row
        parts += [
            text(8, y + 15, f"stage {use.stage}, {use.resource}"),
            box((left, y), (max(use.busy_s * scale, 1), height - 6), BLUE if use.resource == "compute" else GREEN),
            text(left + seconds * scale + 6, y + 15, f"{use.share:.0%}", Font(12)),
        ]
    return document(width, bottom + 10, parts)


def schedules() -> str:
    """Draw the same four stages under three schedules, one below the other."""
    parts, y = [], 0.0
    straight = planner.solve(PROFILE, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=0.1 * GBPS))
    stages = tuple(planner.OwnStage(layers=stage.layers) for stage in straight.stages)
    for name in SCHEDULES:
        divided = None if name == "1f1b" else 8
        own = planner.OwnPlan(stages=stages, schedule=name, microbatches=divided)
        plan = planner.price(PROFILE, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=10 * GBPS), own)
        drawn = timeline_svg([planner.simulate(plan, minibatches=24 // (divided or 1))], (0.0, SECONDS_SHOWN))
        height = float(drawn.split('height="', 1)[1].split('"', 1)[0])
        parts.append(drawn.replace("<svg ", f'<svg y="{y:.0f}" ', 1).strip())
        y += height + 8
    return document(1200, y, parts)


def report(browser_path: str) -> None:
    """Write the report of a plan, and take its picture in light and in dark colours."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        plan_file, page_file = Path(folder) / "plan.json", Path(folder) / "report.html"
        asked = ["--profile", str(FILE), "--gpus", "4", "--bandwidth", "1Gbps", "-o", str(plan_file)]
        plan_command(["solve", *asked])
        plan_command(["report", "--plan", str(plan_file), "--profile", str(FILE), "-o", str(page_file)])
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1100, "height": 820}, color_scheme=scheme)
            page.goto(page_file.as_uri())
            page.wait_for_timeout(500)
            if scheme == "dark":
                page.locator("#timeline-chart").scroll_into_view_if_needed()
                page.evaluate(
                    "document.querySelector('#timeline-chart').scrollIntoView({block: 'start'}); scrollBy(0, -120)"
                )
                page.wait_for_timeout(300)
            picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
            picture.quantize(64).save(IMAGES / f"report-{scheme}.png", optimize=True)
        browser.close()


def main() -> None:
    """Write all pictures, those of the report where it is asked for."""
    plan = planner.solve(PROFILE, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=GBPS))
    explained = explain(PROFILE, plan)
    asked = ["--profile", str(FILE), "--gpus", "8", "--bandwidth", "100Mbps:100Gbps"]
    # A limit that is never reached: the changes that a sweep finds must not depend on this machine.
    plan_command(["sweep", *asked, "--plot", str(IMAGES / "sweep.svg"), "--time-limit", "600s"])
    drawn = {
        "profile.svg": profile_svg(PROFILE),
        "resources.svg": resources(explained.uses, explained.seconds_per_minibatch),
        "schedules.svg": schedules(),
    }
    for name, svg in drawn.items():
        (IMAGES / name).write_text(svg, encoding="utf-8")
    if "--report" in sys.argv[1:]:
        found = shutil.which("chromium") or shutil.which("chromium-browser")
        if found is None:
            sys.exit("no chromium here: apt-get install chromium")
        report(found)


if __name__ == "__main__":
    main()
