"""Tests without the mark `gpu` see no GPU, so that they test the same everywhere."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from typing import Any

import pytest

_LEFT_OUT = pytest.StashKey[int]()
# pytest-xdist hands out files in the order in which they were collected. These mostly wait for
# processes: at the end they would leave cores idle, and beside searches they do not.
_FIRST = ("tests/executor/", "tests/workers/", "tests/cli/")

# pytest-xdist gives its workers a terminal of 80 columns, in which tables are shorter than in a
# file.
os.environ.pop("COLUMNS", None)
# Containers set it, and then each of the hundreds of processes that tests start compiles the
# package anew, which takes a second of each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Modules and captured graphs are many objects that stay. Looking through them again and again takes
# a tenth of the time of the tests that search or estimate.
gc.set_threshold(20_000, 20, 100)
# Shells let what they run in the background ignore Ctrl-C, and nohup lets it ignore that the
# terminal closes. So would all processes that tests start and send these signals to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files, and keep every n-th case of tests that are marked `sampled(n)`, or all where
    the environment has ALL_EXAMPLES.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(_FIRST))
    if os.environ.get("ALL_EXAMPLES") or any("::" in argument for argument in config.args):
        return
    seen: Counter[str] = Counter()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("sampled")
        test = item.nodeid.partition("[")[0]
        (kept if mark is None or seen[test] % mark.args[0] == 0 else left_out).append(item)
        seen[test] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
    config.stash[_LEFT_OUT] = len(left_out)


def pytest_collection_finish() -> None:
    """Leave out of all collections what is imported by now."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that prints: under pytest-xdist another one than those that collect."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear it; all of pytest-xdist's workers collect the same cases."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left_out = config.stash.get(_LEFT_OUT, 0)
    if left_out:
        terminalreporter.write_line(
            f"{left_out} cases of sampled tests were left out; ALL_EXAMPLES=1 runs them"
        )


@pytest.fixture(autouse=True)
def _no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that tests start
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs that this process launches fork their workers: see `tests.executor.warm_start`."""
    from tests.executor.warm_start import start_workers

    monkeypatch.setattr("planner.workers.launch.start_workers", start_workers)
