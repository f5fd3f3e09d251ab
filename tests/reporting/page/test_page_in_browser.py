"""The report in a real browser: the system's Chromium, headless."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from planner.analysis.compare import compare
from planner.formats.cluster import flat_cluster
from planner.reporting.page.page import report_page
from planner.simulator.simulate_plan import simulate
from planner.solver import search_plan as solve
from tests.reporting.page.test_page import evil_plan, slower
from tests.samples import layer, profile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDE, PHONE = (1280, 900), (375, 740)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
    pytest.mark.timeout(240),
]


@dataclass
class Opened:
    """A page, and what it complained of."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def shown(self) -> tuple[float, float]:
        """The stretch of time on show."""
        chart = self.page.locator("#timeline-chart")
        return float(chart.get_attribute("data-from") or "nan"), float(
            chart.get_attribute("data-to") or "nan"
        )

    def event(self) -> str | None:
        """The event that is pointed at."""
        return self.page.get_attribute("#timeline-chart", "data-event")

    def colour_at(self, selector: str, x: int, y: int) -> list[int]:
        """Red, green and blue of a canvas's pixel."""
        script = (
            "([s, x, y]) => { const c = document.querySelector(s); const r = c.width / "
            "c.clientWidth;"
            " return [...c.getContext('2d').getImageData(x * r, y * r, 1, 1).data].slice(0, 3); }"
        )
        found: list[int] = self.page.evaluate(script, [selector, x, y])
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install '.[test]'"
    )
    with api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=120_000)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything in it, of a plan with names to be careful with."""
    plan = evil_plan()
    simulated = simulate(plan, 12)
    model = profile(
        layer("a", 0.2, 0.4, output_bytes=1000), layer("b", 0.1, 0.2, weight_bytes=10**8)
    )
    solved = solve(model, flat_cluster(3, 1e8))
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(
        report_page(plan, simulated, slower(simulated, 1.1), compare(model, solved)),
        encoding="utf-8",
    )
    return path


def opened(
    browser: Browser, file: Path, size: tuple[int, int], scheme: str = "light", touch: bool = False
) -> Opened:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
        has_touch=touch,
        is_mobile=touch,
        offline=True,
    )
    context.set_default_timeout(60_000)
    result = Opened(context.new_page())
    result.page.on("console", lambda message: result.complaints.append(message.text))
    result.page.on("pageerror", lambda error: result.complaints.append(str(error)))
    result.page.on("dialog", lambda dialog: result.complaints.append(dialog.message))
    result.page.on("requestfailed", lambda request: result.complaints.append(request.url))
    result.page.goto(file.as_uri())
    wait_for(result.page, "document.querySelector('#timeline-chart canvas').width > 300")
    return result


def settled(shown: Opened) -> None:
    """Wait until the charts are painted anew."""
    shown.page.evaluate(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )


def wait_for(page: Page, condition: str) -> None:
    """Wait until an expression holds; Playwright's own way polls by `eval`, which the page
    forbids.
    """
    for _ in range(1200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


@pytest.fixture
def wide(browser: Browser, file: Path) -> Iterator[Opened]:
    result = opened(browser, file, WIDE)
    yield result
    result.page.context.close()
    assert result.complaints == []


def test_everything_is_there(wide: Opened) -> None:
    titles = wide.page.locator("h2").all_inner_texts()
    assert titles == [
        "Summary",
        "Predicted and measured",
        "Bottleneck",
        "Stages",
        "Timeline",
        "Memory",
        "Compared with other plans",
    ]
    assert wide.page.locator(".layers > li").count() == 3
    wide.page.get_by_role("button", name="Whole run").click()
    settled(wide)
    assert wide.colour_at("#timeline-chart canvas", 90, 27) == [0x00, 0x72, 0xB2]  # F0
    wide.page.get_by_text("All layers").click()
    assert (
        wide.page.locator(".layers ol").first.inner_text().strip()
        == '</script><script>alert("1")</script>'
    )


def test_pointing_at_an_event_shows_what_it_is(wide: Opened) -> None:
    chart = wide.page.locator("#timeline-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    assert not wide.page.locator(".tip").is_visible()
    wide.page.get_by_role("button", name="Whole run").click()
    wide.page.mouse.move(box["x"] + 90, box["y"] + 35)
    wide.page.wait_for_selector(".tip:not([hidden])")
    assert wide.event() == "F0"
    tip = wide.page.locator(".tip").inner_text()
    assert tip.splitlines() == [
        "F0: forward of minibatch 0",
        "stage 0 on worker 0, simulated",
        "0 to 1 s, 1 s",
    ]
    assert "forward of minibatch 0" in wide.page.locator("#timeline-detail").inner_text()
    wide.page.mouse.move(box["x"] + 90, box["y"] - 30)
    wide.page.wait_for_selector(".tip", state="hidden")


def test_an_event_says_the_lengths_of_its_microbatch(browser: Browser, tmp_path: Path) -> None:
    plan = evil_plan()
    lengths = tuple((minibatch, 0, 10 + minibatch, 20) for minibatch in range(12))
    changes = {"length_names": ("source", "<b>target"), "lengths": lengths}
    path = tmp_path / "report.html"
    path.write_text(
        report_page(plan, simulate(plan, 12).model_copy(update=changes)), encoding="utf-8"
    )
    shown = opened(browser, path, WIDE)
    chart = shown.page.locator("#timeline-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    shown.page.get_by_role("button", name="Whole run").click()
    shown.page.mouse.move(box["x"] + 90, box["y"] + 35)
    shown.page.wait_for_selector(".tip:not([hidden])")
    tip = shown.page.locator(".tip").inner_text()
    assert tip.splitlines()[0] == "F0: forward of minibatch 0, source 10, <b>target 20"
    shown.page.context.close()
    assert shown.complaints == []


def test_wheel_and_buttons_zoom_and_dragging_moves(wide: Opened) -> None:
    chart = wide.page.locator("#timeline-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    wide.page.get_by_role("button", name="Whole run").click()
    whole = wide.shown()
    wide.page.mouse.move(box["x"] + 600, box["y"] + 35)
    wide.page.mouse.wheel(0, -240)
    wait_for(wide.page, f"document.querySelector('#timeline-chart').dataset.to < {whole[1] * 0.95}")
    wheeled = wide.shown()
    assert whole[0] < wheeled[0] < wheeled[1] < whole[1]
    wide.page.mouse.down()
    wide.page.mouse.move(box["x"] + 500, box["y"] + 35, steps=4)
    wide.page.mouse.up()
    moved = wide.shown()
    assert moved[0] > wheeled[0]
    assert moved[1] - moved[0] == pytest.approx(wheeled[1] - wheeled[0])
    wide.page.get_by_role("button", name="Whole run").click()
    assert wide.shown() == whole
    wide.page.get_by_role("button", name="Zoom in").click()
    half = wide.shown()
    assert half[1] - half[0] == pytest.approx((whole[1] - whole[0]) / 2)
    wide.page.get_by_role("button", name="Zoom out").click()
    assert wide.shown() == pytest.approx(whole)
    wide.page.get_by_role("button", name="Steady state").click()
    assert wide.shown()[1] - wide.shown()[0] < 0.6 * whole[1]


def test_the_keyboard_does_all_of_it(wide: Opened) -> None:
    page = wide.page
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "timeline-chart":
            break
    assert page.evaluate("document.activeElement.id") == "timeline-chart"
    page.keyboard.press("Home")
    whole = wide.shown()
    page.keyboard.press("ArrowRight")
    assert wide.event() == "F0"
    page.keyboard.press("ArrowRight")
    assert wide.event() == "F1"
    assert "F1: forward of minibatch 1" in page.locator("#timeline-detail").inner_text()
    page.keyboard.press("ArrowLeft")
    assert wide.event() == "F0"
    page.keyboard.press("ArrowDown")
    assert wide.event() == "A0"
    page.keyboard.press("ArrowUp")
    assert wide.event() == "F1"  # which begins with A0
    page.keyboard.press("+")
    zoomed = wide.shown()
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.keyboard.press("Shift+ArrowRight")
    assert wide.shown()[1] > zoomed[1] or wide.shown()[1] == whole[1]
    page.keyboard.press("Home")
    assert wide.shown() == whole
    page.keyboard.press("Escape")
    assert wide.event() == ""


def test_runs_are_aligned_by_minibatch(wide: Opened) -> None:
    page = wide.page
    start, end = wide.shown()
    assert end - start == pytest.approx(18.9)  # six minibatches
    chart = page.locator("#timeline-chart")
    assert chart.get_attribute("data-shift") not in (None, "0")
    page.get_by_role("button", name="Align by minibatch").click()
    assert chart.get_attribute("data-shift") == "0"
    assert wide.shown() == (start, end)


def test_memory_follows_the_timeline(wide: Opened) -> None:
    picture = "document.querySelector('#memory-chart canvas').toDataURL()"
    before = wide.page.evaluate(picture)
    wide.page.get_by_role("button", name="Zoom in").click()
    wait_for(wide.page, f"{picture} !== {json.dumps(before)}")


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, file: Path) -> None:
    phone = opened(browser, file, PHONE, touch=True)
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    small = phone.page.evaluate(
        "[...document.querySelectorAll('p, dd, dt, li, td, th, button, summary, output')]"
        ".filter((e) => e.offsetParent && parseFloat(getComputedStyle(e).fontSize) < 12).length"
    )
    assert small == 0
    buttons = phone.page.evaluate(
        "[...document.querySelectorAll('button')].map((b) => b.getBoundingClientRect()).every((b) "
        "=> b.height >= 40)"
    )
    assert buttons
    chart = phone.page.locator("#timeline-chart")
    chart.scroll_into_view_if_needed()
    assert phone.page.get_by_text("Pinch to zoom").is_visible()
    assert not phone.page.get_by_text("The wheel").is_visible()
    phone.page.get_by_role("button", name="Whole run").tap()
    chart.tap(position={"x": 58, "y": 35})
    assert phone.event() == "F0"
    phone.page.context.close()
    assert phone.complaints == []


def luminance(colour: list[float]) -> float:
    """Relative luminance (WCAG 2)."""
    linear = [
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
        for c in (part / 255 for part in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_have_contrast(browser: Browser, file: Path, scheme: str) -> None:
    shown = opened(browser, file, WIDE, scheme)
    background = shown.colour_at("#timeline-chart canvas", 5, 5)
    assert (luminance([*map(float, background)]) < 0.1) == (scheme == "dark")
    pairs = shown.page.evaluate(
        """() => {
            const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
            const behind = (e) => {
                for (let b = e; b; b = b.parentElement) {
                    const c = rgb(getComputedStyle(b).backgroundColor);
                    if (c.length < 4 || c[3] > 0) return c.slice(0, 3);
                }
                return [255, 255, 255];
            };
            const texts = 'p, dd, dt, h1, h2, h3, td, th, a, small, summary, button, footer, b';
            const color = (e) => rgb(getComputedStyle(e).color).slice(0, 3);
            return [...document.querySelectorAll(texts)]
                .filter((e) => e.offsetParent)
                .map((e) => [color(e), behind(e), e.outerHTML.slice(0, 60)]);
        }"""
    )
    assert len(pairs) > 50
    for text, behind, what in pairs:
        lighter, darker = sorted((luminance(text), luminance(behind)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, what
    shown.page.context.close()


def test_paper_is_light_and_shows_what_is_folded(
    browser: Browser, file: Path, tmp_path: Path
) -> None:
    shown = opened(browser, file, WIDE, "dark")
    unfolded = shown.page.locator("details[open]").count()
    shown.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.colour_at("#timeline-chart canvas", 5, 5) == [255, 255, 255]
    assert shown.page.locator("details:not([open])").count() == 0
    shown.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert shown.colour_at("#timeline-chart canvas", 5, 5) != [255, 255, 255]
    assert shown.page.locator("details[open]").count() == unfolded
    assert shown.page.pdf(format="A4").startswith(b"%PDF")
    shown.page.context.close()
