"""Hosts in network namespaces whose workers are killed and stopped, and which are lost: the losses
stay the same.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from benchmarks.netns import NetworkUnavailableError
from tests.campaigns.elastic.faults import (
    EVERY,
    HANG_TIMEOUT_S,
    KILLED,
    STOPPED,
    Campaign,
    Outcome,
    cluster,
    reference,
    run,
    write_plan,
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_loses_hosts_computes_what_one_that_is_stopped_and_resumed_does() -> None:
    try:
        outcome = run(
            hosts=3, per_host=1, faults=3, steps=120, draw=random.Random(3), replicated=True
        )
    except NetworkUnavailableError as cause:
        pytest.skip(f"no network namespaces here: {cause}")
    assert outcome.problems == []
    assert outcome.faults
    assert 0 < sum(outcome.stood_s) < outcome.whole_s


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_that_is_stopped_while_it_starts_up_is_noticed(tmp_path: Path) -> None:
    """Stopped before it opened the store of its start, worker 0 let all others wait for two
    minutes.
    """
    plan, outcome = write_plan(3, 1, tmp_path), Outcome()
    try:
        with cluster(3, 5000, tmp_path, ("--copy-every", str(EVERY))) as found:
            campaign = Campaign(found, 3, plan, random.Random(1), outcome)
            assert campaign.wait_for(0.0) is not None
            for host, phase in (
                (0, "imports"),
                (2, "imports"),
                (0, "meeting"),
                (1, "joining"),
                (0, "connecting"),
            ):
                assert campaign.hit(KILLED, phase, STOPPED, host)
                fault = outcome.faults[-1]
                assert (fault.kind, fault.phase, fault.host) == (STOPPED, phase, host)
                assert fault.went_on_s is not None
                assert fault.went_on_s < 8 * HANG_TIMEOUT_S  # with the start after it
    except NetworkUnavailableError as cause:
        pytest.skip(f"no network namespaces here: {cause}")
    assert outcome.problems == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loss_of_the_host_with_the_store_ends_the_run_and_the_copies_outlive_it(
    tmp_path: Path,
) -> None:
    plan, steps = write_plan(3, 1, tmp_path), 6 * EVERY
    try:
        with cluster(
            3, steps, tmp_path, ("--copy-every", str(EVERY), "--evaluate-every", "15")
        ) as found:
            while not (updates := found.updates()) or updates[-1].minibatch < 3 * EVERY:
                assert not found.ended
                time.sleep(0.05)
            found.lose(0)
            for host in (1, 2):
                assert found.processes[host].wait() == 1
                answer = tmp_path / f"out-{host}"
                assert (
                    "where hosts meet, is not reached"
                    in json.loads(answer.read_text(encoding="utf-8"))["error"]
                )
                answer.unlink()
            found.meets_at = 1
            for host in (1, 2):
                found.start(host)
            assert [found.processes[host].wait() for host in (1, 2)] == [0, 0]
            texts = [(tmp_path / f"out-{host}").read_text(encoding="utf-8") for host in (1, 2)]
    except NetworkUnavailableError as cause:
        pytest.skip(f"no network namespaces here: {cause}")
    (result,) = [json.loads(text) for text in texts if text]
    (event,) = result["restarts"]
    assert event.startswith("lost host")
    assert result["first_minibatch"] in (EVERY, 2 * EVERY, 3 * EVERY)
    assert result["losses"] == reference(plan, result["restarts"], steps, tmp_path)["losses"]
