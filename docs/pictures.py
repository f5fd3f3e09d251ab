"""Draw the pictures of the explanation and of the report: python -m docs.pictures [--report]

All are the product's own, of VGG-16 as measured in profiles/vgg16/cpu.json. Only those of the
report need a browser (the system's Chromium, through playwright), and pillow to make them small.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import planner
from planner.analysis.explain import ResourceUse, explain
from planner.cli.main import main as plan_command
from planner.formats.plan_parts import short_config
from planner.formats.timeline import EventKind
from planner.reporting.svg import Font, box, document, line, text, timeline_svg
from planner.reporting.tables.profile import output_bytes, time_s
from planner.reporting.timeline import COLOURS
from planner.units import format_bandwidth, format_bytes, format_rate, format_seconds

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
FILE = ROOT / "profiles" / "vgg16" / "cpu.json"
PROFILE = planner.load_profile(FILE)
GBPS = 125e6  # bytes/s
SCHEDULES = ("1f1b", "1f1b-flush", "gpipe")
SECONDS_SHOWN = 2.0  # of each schedule, from its start
MINIBATCHES_SHOWN = 8  # of one timeline
BLUE, GREEN, ORANGE = "#0072b2", "#009e73", "#d55e00"
MARGIN, LENGTH, HEIGHT = 90, 960, 130  # of each chart of a profile
PARTS: tuple[EventKind, ...] = ("forward", "backward", "update")
PLAIN = "#6b7785"  # no kind of event has this colour


def profile_svg() -> str:
    """Draw charts of time, weights and output, with a bar per layer whose name and numbers show
    when pointed at.
    """
    profile = PROFILE
    layers, plain = profile.layers, [PLAIN]
    charts: tuple[tuple[str, Sequence[Sequence[float]], Sequence[str]], ...] = (
        (
            "time",
            [[la.forward_s, la.backward_s, la.update_s] for la in layers],
            [COLOURS[kind] for kind in PARTS],
        ),
        ("weights", [[layer.weight_bytes] for layer in layers], plain),
        ("output", [[output_bytes(layer)] for layer in layers], plain),
    )
    titles = [
        f"{layer.name} ({layer.op}): {format_seconds(time_s(layer))}, weights "
        f"{format_bytes(layer.weight_bytes)}, "
        f"output {format_bytes(output_bytes(layer))}"
        for layer in layers
    ]
    samples = f", {profile.microbatch_size} samples" if profile.microbatch_size is not None else ""
    parts = [
        text(
            MARGIN,
            16,
            f"{profile.model} on {profile.device.name}{samples}, {profile.provenance.source}",
        )
    ]
    parts += [
        text(MARGIN + 120 * i, 34, f"■ {kind}", Font(12, fill=COLOURS[kind]))
        for i, kind in enumerate(PARTS)
    ]
    step, bottom, label = LENGTH / len(layers), 4.0, Font(12, "end")
    for name, bars, colours in charts:
        most, bottom = max(map(sum, bars)) or 1.0, bottom + HEIGHT + 46
        parts.append(text(MARGIN - 8, bottom, name, label))
        written = format_seconds(most) if name == "time" else format_bytes(most)
        parts.append(text(MARGIN - 8, bottom - HEIGHT + 10, written, label))
        parts.append(line((MARGIN, bottom), (MARGIN + LENGTH, bottom), "#000000"))
        for number, values in enumerate(bars):
            top = bottom
            for value, colour in zip(values, colours, strict=True):
                height = HEIGHT * value / most
                top -= height
                if height:
                    size = max(0.5, step * 0.9), height
                    parts.append(box((MARGIN + number * step, top), size, colour, titles[number]))
    return document(MARGIN + LENGTH + 20, bottom + 36, parts)


def resources(uses: tuple[ResourceUse, ...], seconds: float) -> str:
    """Draw a bar for each device and link: how long it is busy per minibatch, and the time that a
    minibatch takes.
    """
    left, width, height = 170, 900, 24
    scale = (width - left - 160) / seconds
    bottom = 48 + height * len(uses)
    orange = Font(12, fill=ORANGE)
    parts = [
        text(8, 22, "VGG-16, 2-1-1 on 4 devices at 1 Gbit/s: busy seconds per minibatch", Font(15)),
        line((left + seconds * scale, 34), (left + seconds * scale, bottom), ORANGE, "5 4"),
        text(
            left + seconds * scale + 6, bottom, f"{format_seconds(seconds)} per minibatch", orange
        ),
    ]
    for row, use in enumerate(uses):
        y = 40 + height * row
        parts += [
            text(8, y + 15, f"stage {use.stage}, {use.resource}"),
            box(
                (left, y),
                (max(use.busy_s * scale, 1), height - 6),
                BLUE if use.resource == "compute" else GREEN,
            ),
            text(left + seconds * scale + 6, y + 15, f"{use.share:.0%}", Font(12)),
        ]
    return document(width, bottom + 10, parts)


def bandwidths() -> str:
    """Draw a bar per bandwidth as long as its plan is fast, with its config, and a mark for data
    parallelism.
    """
    rates = [0.1 * GBPS * 1000 ** (step / 12) for step in range(13)]
    plans = [
        planner.solve(PROFILE, planner.flat_cluster(8, rate), schedule="1f1b") for rate in rates
    ]
    speeds = [plan.predicted.samples_per_s or 0.0 for plan in plans]
    values, bars, height = 110, 420, 26
    scale = bars / max(speeds)
    title = text(16, 26, f"{PROFILE.model}: the fastest plan by bandwidth", Font(17, weight="bold"))
    parts = [title, text(values, 48, "samples/s; the mark is data parallelism")]
    for row, (rate, plan, speed) in enumerate(zip(rates, plans, speeds, strict=True)):
        y = 60 + height * row
        value, config = format_bandwidth(rate), short_config(plan.config)
        length = speed * scale
        parts.append(text(values - 8, y + 15, value, Font(anchor="end")))
        parts.append(
            box(
                (values, y),
                (max(length, 0.5), height - 6),
                COLOURS["forward"],
                f"{value}: {config}",
            )
        )
        if plan.predicted.speedup_over_data_parallel:
            x = values + length / plan.predicted.speedup_over_data_parallel
            parts.append(box((x - 1.5, y - 2), (3, height - 2), ORANGE))
        parts.append(text(values + length + 10, y + 15, format_rate(speed)))
        parts.append(text(values + length + 70, y + 15, config))
    return document(860, 70 + height * len(plans), parts)


def schedules() -> str:
    """Draw the same four stages under three schedules, one below the other."""
    parts, y = [], 0.0
    straight = planner.solve(
        PROFILE, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=0.1 * GBPS)
    )
    stages = tuple(planner.OwnStage(layers=stage.layers) for stage in straight.stages)
    for name in SCHEDULES:
        divided = None if name == "1f1b" else 8
        own = planner.OwnPlan(stages=stages, schedule=name, microbatches=divided)
        plan = planner.price(
            PROFILE, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=10 * GBPS), own
        )
        drawn = timeline_svg(
            [planner.simulate(plan, minibatches=24 // (divided or 1))], (0.0, SECONDS_SHOWN)
        )
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
        asked = [
            "--profile",
            str(FILE),
            "--gpus",
            "4",
            "--bandwidth",
            "1Gbps",
            "-o",
            str(plan_file),
        ]
        plan_command(["solve", *asked])
        plan_command(
            ["report", "--plan", str(plan_file), "--profile", str(FILE), "-o", str(page_file)]
        )
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"]
        )
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1100, "height": 820}, color_scheme=scheme)
            page.goto(page_file.as_uri())
            page.wait_for_timeout(500)
            if scheme == "dark":
                page.locator("#timeline-chart").scroll_into_view_if_needed()
                page.evaluate(
                    "document.querySelector('#timeline-chart').scrollIntoView({block: 'start'}); "
                    "scrollBy(0, -120)"
                )
                page.wait_for_timeout(300)
            picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
            picture.quantize(64).save(IMAGES / f"report-{scheme}.png", optimize=True)
        browser.close()


def main() -> None:
    """Write all pictures, those of the report where it is asked for."""
    plan = planner.solve(PROFILE, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=GBPS))
    explained = explain(PROFILE, plan)
    drawn = {
        "profile.svg": profile_svg(),
        "resources.svg": resources(explained.uses, explained.seconds_per_minibatch),
        "schedules.svg": schedules(),
        "bandwidths.svg": bandwidths(),
        "timeline.svg": timeline_svg([planner.simulate(plan, minibatches=MINIBATCHES_SHOWN)]),
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
