"""Hosts in network namespaces whose workers are killed and stopped, and which are lost: the losses stay the same."""

from __future__ import annotations

import random

import pytest

from benchmarks.elastic.__main__ import tables
from benchmarks.elastic.faults import run
from benchmarks.netns import NetworkUnavailableError


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_loses_hosts_computes_what_one_without_faults_does() -> None:
    try:
        outcome = run(hosts=3, per_host=1, faults=3, steps=120, draw=random.Random(3), replicated=True)
    except NetworkUnavailableError as cause:
        pytest.skip(f"no network namespaces here: {cause}")
    assert outcome.problems == []
    assert outcome.faults
    portion = {"faults": [vars(fault) for fault in outcome.faults], "start_s": outcome.start_s, "problems": []}
    assert f"{len(outcome.faults)} faults in 1 runs" in tables([portion])
