"""Hosts in network namespaces whose workers are killed and stopped, and which are lost: the losses
stay the same.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from benchmarks.elastic.__main__ import main, tables
from benchmarks.elastic.faults import (
    EVERY,
    HANG_TIMEOUT_S,
    KILLED,
    STOPPED,
    Campaign,
    Fault,
    Outcome,
    cluster,
    reference,
    run,
    write_plan,
)
from benchmarks.elastic.spot.__main__ import WAYS, ideal, read_trace, train
from benchmarks.netns import NetworkUnavailableError


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
    portion = {
        "faults": [vars(fault) for fault in outcome.faults],
        "start_s": outcome.start_s,
        "problems": [],
    }
    assert f"{len(outcome.faults)} faults in 1 runs" in tables([portion])


@pytest.mark.parametrize(
    ("asked", "happened", "says"),
    [
        ((2, 0), [], "only 0 of 2 faults happened before the run ended"),
        ((2, 1), [False, False], "only 0 of 1 faults happened during a recovery"),
        ((2, 1), [False, True], ""),
    ],
)
def test_a_run_with_fewer_faults_than_were_asked_has_shown_nothing(
    asked: tuple[int, int],
    happened: list[bool],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It said "0 promises broken" after 0 faults, with exit code 0."""
    faults = [
        Fault(KILLED, "forward", 1, 20, 3, went_on_s=8.0, repeated=5, second=second)
        for second in happened
    ]
    outcome = Outcome(faults, start_s=5.0, whole_s=40.0, stood_s=[8.0] * len(faults))
    monkeypatch.setattr("benchmarks.elastic.__main__.run", lambda *_, **__: outcome)
    monkeypatch.setattr("benchmarks.elastic.__main__.measure", lambda _: None)
    monkeypatch.setattr(
        "sys.argv", ["elastic", "--faults", str(asked[0]), "--second", str(asked[1])]
    )
    assert main() == (1 if says else 0)
    answer = capsys.readouterr()
    assert says in answer.err
    assert len(answer.err.splitlines()) == (1 if says else 0)
    if happened:
        assert (
            "training stood still 2 times, 16 s of 40 s (40%), median 8.0 s, longest 8.0 s"
            in answer.out
        )


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


def test_copies_keep_more_of_a_spot_market_than_the_same_checkpoints_alone() -> None:
    trace, end_s, speeds = (
        read_trace(),
        24.5 * 3600,
        {count: 20.0 / count for count in range(1, 13)},
    )
    kept = {
        way.name: train(trace, end_s, speeds, 5e9, way, random.Random(1))[-1][1] for way in WAYS
    }
    with_copies, best, alone, seldom = (
        kept[way.name] / ideal(trace, end_s, speeds) for way in WAYS
    )
    assert 1.0 > with_copies > alone > seldom > 0.3
    assert best > alone
    # By hand: 10 s to load, 20 s to start, and 13 minibatches of 5 s, of which the first ten are in
    # a copy.
    two = train([(0.0, 4), (100.0, 3)], 1000.0, {4: 5.0, 3: 6.0}, 6.25e9, WAYS[0], random.Random(1))
    assert two[1] == (100.0, 10.0)
