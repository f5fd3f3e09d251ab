"""Heartbeats, and who is named when everything stands still: pages written by hand, no processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.schedule.instructions import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Unit,
    Update,
)
from planner.workers.hangs import Hang, HangDetector, Sign, look_at
from planner.workers.heartbeat import Beat, Heartbeat, State
from planner.workers.job import Job
from planner.workers.local_watch import beat_path, place_in_dump, read_beat
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile

TIMEOUT_S = 10.0
RECEIVE = ReceiveActivation(1, Unit(17), 0, 0)  # what stage 1 on rank 1 waits for, from rank 0


def beat_of(*instructions: Instruction) -> Beat:
    """A worker's page after it began the last of `instructions`."""
    heartbeat = Heartbeat()
    for instruction in instructions:
        heartbeat.begin(instruction)
    return heartbeat.read()


def judge(beats: dict[int, Beat], *, ranks: tuple[tuple[int, ...], ...] = ((0,), (1,)), **signs: str) -> Hang | None:
    """The verdict when `beats` have not changed for longer than the time-out; `frozen_1="..."` marks rank 1."""
    detector = HangDetector(ranks, TIMEOUT_S)
    seen = {rank: Sign(beat, frozen=signs.get(f"frozen_{rank}")) for rank, beat in beats.items()}
    assert detector.look(seen, 0.0) is None
    assert detector.look(seen, TIMEOUT_S - 1) is None, "not yet"
    return detector.look(seen, TIMEOUT_S + 1)


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        (Forward(0, Unit(3)), "in the forward of minibatch 3"),
        (Backward(0, Unit(3, 2)), "in the backward of minibatch 3, microbatch 2"),
        (AllReduce(0, 5, 2), "in the all-reduce of round 5"),
        (RECEIVE, "waiting for the activations of minibatch 17 from worker 0"),
        (SendGradient(1, Unit(4), 0, 0), "sending the gradients of minibatch 4 to worker 0"),
    ],
)
def test_a_page_says_what_its_worker_does(tmp_path: Path, instruction: Instruction, words: str) -> None:
    heartbeat = Heartbeat(beat_path(tmp_path, 1))
    assert read_beat(tmp_path, 1) is None, "it has not begun"
    heartbeat.begin(instruction)
    beat = read_beat(tmp_path, 1)
    assert beat is not None
    assert beat == heartbeat.read()
    assert beat.describe() == words
    assert beat.stage == instruction.stage


def test_an_update_is_told_by_the_workers_last_minibatch() -> None:
    heartbeat = Heartbeat()
    heartbeat.begin(Backward(0, Unit(11)))
    heartbeat.begin(Update(0, 5))
    assert heartbeat.read().describe() == "in the update after minibatch 11"


def test_a_phase_and_an_evaluation_are_told_apart_from_training() -> None:
    heartbeat = Heartbeat()
    heartbeat.begin(SendActivation(0, Unit(4), 1, 1))
    heartbeat.enter("writing a checkpoint")
    assert heartbeat.read().describe() == "while writing a checkpoint"
    assert heartbeat.read().state is State.PREPARING
    heartbeat.begin(SendActivation(0, Unit(9), 1, 1), evaluating=True)
    assert heartbeat.read().describe() == "sending the activations of minibatch 9 of the evaluation to worker 1"
    heartbeat.begin(Forward(0, Unit(2)), evaluating=True)
    assert heartbeat.read().describe() == "in the forward of minibatch 2 of the evaluation"


def test_a_page_remembers_the_slowest_instruction() -> None:
    heartbeat = Heartbeat()
    heartbeat.begin(SendActivation(0, Unit(4), 1, 1))
    time.sleep(0.02)
    heartbeat.begin(Forward(0, Unit(5)))
    assert heartbeat.read().slowest_s >= 0.02


def test_a_worker_that_computes_without_end_is_named_and_not_the_one_that_waits_for_it() -> None:
    hang = judge({0: beat_of(Forward(0, Unit(17))), 1: beat_of(RECEIVE)})
    assert hang is not None
    assert (hang.rank, hang.stage, hang.busy) == (0, 0, True)
    assert hang.message == "has not moved for 11 s, in the forward of minibatch 17"


def test_the_one_that_waits_is_not_named_though_it_began_to_wait_earlier() -> None:
    detector = HangDetector([(0,), (1,)], TIMEOUT_S)
    waiting = Sign(beat_of(RECEIVE))
    detector.look({0: Sign(beat_of(Update(0, 3))), 1: waiting}, 0.0)
    both = {0: Sign(beat_of(Update(0, 3), Forward(0, Unit(17)))), 1: waiting}
    assert detector.look(both, 4.0) is None
    assert detector.look(both, TIMEOUT_S + 1) is None, "rank 1 is late, but rank 0 may still send"
    hang = detector.look(both, TIMEOUT_S + 5)
    assert hang is not None
    assert hang.rank == 0


def test_a_stopped_worker_is_named_though_it_says_that_it_waits() -> None:
    sender = beat_of(SendActivation(0, Unit(18), 1, 1), ReceiveGradient(0, Unit(17), 1, 1))
    hang = judge({0: sender, 1: beat_of(RECEIVE)}, frozen_1="is stopped by a signal")
    assert hang is not None
    assert hang.rank == 1
    assert hang.message.endswith("waiting for the activations of minibatch 17 from worker 0: it is stopped by a signal")


def with_device(host: Instruction, device: Instruction | None, passed: int = 7) -> Beat:
    """A worker's page whose host is ahead of its device."""
    heartbeat = Heartbeat()
    heartbeat.begin(host)
    heartbeat.follow(lambda: (passed, device))
    heartbeat.look_at_device()
    return heartbeat.read()


def test_a_host_that_its_device_holds_up_is_not_named_while_the_device_waits_for_another_worker() -> None:
    """Its host has come to the next forward, and waits there: in the allocator, or for a queue that is full."""
    held_up = with_device(Forward(0, Unit(20)), ReceiveGradient(0, Unit(17), 1, 1))
    hang = judge({0: held_up, 1: with_device(Backward(1, Unit(17)), Backward(1, Unit(17)))})
    assert hang is not None
    assert hang.rank == 1
    assert hang.message.endswith("in the backward of minibatch 17, its device in the backward of minibatch 17")
    hang = judge({0: held_up, 1: with_device(ReceiveActivation(1, Unit(20), 0, 0), None)})
    assert hang is not None
    assert hang.message.endswith("and all others wait too: a link carries nothing, or lost a message")


def test_a_device_that_computes_without_end_is_named_though_its_host_waits() -> None:
    endless = with_device(ReceiveGradient(0, Unit(18), 1, 1), Forward(0, Unit(17)))
    hang = judge({1: beat_of(RECEIVE), 0: endless})
    assert hang is not None
    assert hang.rank == 0
    assert hang.message.endswith("from worker 1, its device in the forward of minibatch 17")


def test_a_device_that_goes_on_is_progress_of_a_host_that_waits_for_it() -> None:
    detector = HangDetector([(0,)], TIMEOUT_S)
    for second in range(40):
        beat = dataclasses.replace(with_device(Forward(0, Unit(90)), Backward(0, Unit(second)), second), beats=1)
        assert detector.look({0: Sign(beat)}, float(second)) is None


def test_a_message_that_does_not_arrive_is_the_links_fault() -> None:
    detector = HangDetector([(0,), (1,)], TIMEOUT_S)
    sender = Sign(beat_of(SendActivation(0, Unit(18), 1, 1), ReceiveGradient(0, Unit(17), 1, 1)))
    assert detector.look({1: Sign(beat_of(RECEIVE))}, 0.0) is None
    both = {0: sender, 1: Sign(beat_of(RECEIVE))}
    assert detector.look(both, 2.0) is None
    assert detector.look(both, TIMEOUT_S + 1) is None, "rank 0 may still do its part"
    hang = detector.look(both, TIMEOUT_S + 3)
    assert hang is not None
    assert (hang.rank, hang.busy) == (1, False)
    assert hang.message == (
        "has waited for 13 s for the activations of minibatch 17 from worker 0, and all others wait too: "
        "a link carries nothing, or lost a message"
    )


def test_nobody_is_named_while_the_one_waited_for_moves() -> None:
    detector = HangDetector([(0,), (1,)], TIMEOUT_S)
    waiting = Sign(beat_of(RECEIVE))
    for second in range(40):
        moving = Sign(dataclasses.replace(beat_of(Forward(0, Unit(17))), beats=second + 1))
        assert detector.look({0: moving, 1: waiting}, float(second)) is None


def test_the_slowest_instruction_so_far_is_allowed_for() -> None:
    slow = dataclasses.replace(beat_of(Forward(0, Unit(1))), slowest_s=30.0)
    detector = HangDetector([(0,), (1,)], TIMEOUT_S)
    signs = {0: Sign(slow), 1: Sign(beat_of(RECEIVE))}
    assert detector.look(signs, 0.0) is None
    assert detector.look(signs, 39.0) is None
    assert detector.look(signs, 41.0) is not None


def test_a_replica_that_does_not_come_to_the_all_reduce_is_named() -> None:
    reducing = beat_of(AllReduce(0, 5, 2))
    hang = judge({0: reducing, 1: beat_of(Backward(0, Unit(11)))}, ranks=((0, 1),))
    assert hang is not None
    assert (hang.rank, hang.busy) == (1, True)
    hang = judge({0: reducing, 1: reducing}, ranks=((0, 1),))
    assert hang is not None
    assert "a link carries nothing" in hang.message


def test_a_worker_that_uses_its_processor_is_preparing_and_one_that_does_not_hangs() -> None:
    heartbeat = Heartbeat()
    heartbeat.enter("building its model")
    others = Heartbeat()
    others.enter("joining the other workers", meeting=True)
    detector = HangDetector([(0,), (1,)], TIMEOUT_S)
    for second in range(60):
        signs = {0: Sign(heartbeat.read(), cpu_s=0.5 * second), 1: Sign(others.read(), cpu_s=1.0)}
        assert detector.look(signs, float(second)) is None
    hang = detector.look({0: Sign(heartbeat.read(), cpu_s=29.6), 1: Sign(others.read(), cpu_s=1.0)}, 75.0)
    assert hang is not None
    assert hang.rank == 0
    assert "while building its model" in hang.message


def preparing(pid: int = 0) -> Beat:
    heartbeat = Heartbeat()
    heartbeat.enter("building its model")
    return dataclasses.replace(heartbeat.read(), pid=pid)


@pytest.mark.parametrize(
    ("ran", "starved", "hangs"),
    [
        (0.002, 0.998, False),  # others have its core: it uses all that it gets
        (0.03, 0.0, True),  # a core is free, and it does next to nothing
        (0.01, 0.4, True),  # it wakes up now and then, and waits for a core each time
        (0.0, 0.0, True),
    ],
)
def test_a_worker_that_waits_for_a_core_is_not_hung(ran: float, starved: float, hangs: bool) -> None:
    detector, found = HangDetector([(0,)], TIMEOUT_S), []
    for look in range(60):  # every half second
        at_s = look / 2
        found.append(detector.look({0: Sign(preparing(), ran * at_s, starved * at_s)}, at_s))
    assert any(found) == hangs


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell who waits for a core")
def test_real_processes_starved_and_hung() -> None:
    core = min(os.sched_getaffinity(0))
    start = f"import os, time; os.sched_setaffinity(0, {{{core}}})\n"
    spin, poll = "while True: pass", "while True: time.sleep(0.02)"
    programs = [f"os.nice(19)\n{spin}", poll, spin, spin]
    processes = [subprocess.Popen([sys.executable, "-c", start + program]) for program in programs]
    try:
        time.sleep(1.0)  # the interpreters' start is progress
        starved, polling, *_ = (preparing(process.pid) for process in processes)
        detectors = [HangDetector([(0,)], 4.0) for _ in range(2)]
        hung = [False, False]
        first, began_s = look_at(starved), time.monotonic()
        while (now_s := time.monotonic()) < began_s + 10:
            for number, beat in enumerate((starved, polling)):
                hung[number] |= detectors[number].look({0: look_at(beat)}, now_s) is not None
            time.sleep(0.2)
        last = look_at(starved)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert (last.cpu_s or 0.0) - (first.cpu_s or 0.0) < 0.05 * 10, "it was not starved"
    assert hung == [False, True]


def test_time_without_a_core_is_no_hang_in_any_instruction() -> None:
    beat = beat_of(Forward(0, Unit(3)))
    detector = HangDetector([(0,)], TIMEOUT_S)
    found = [detector.look({0: Sign(beat, 0.0, 0.7 * at_s)}, float(at_s)) for at_s in range(40)]
    assert next(at_s for at_s, hang in enumerate(found) if hang) == 34  # 10 of 34 s with a core


def test_when_all_wait_the_run_ends_all_the_same() -> None:
    hang = judge({0: beat_of(ReceiveGradient(0, Unit(17), 1, 1)), 1: beat_of(RECEIVE)})
    assert hang is not None
    assert "all others wait too" in hang.message


def test_the_place_in_a_dump_is_the_users_innermost_line(tmp_path: Path) -> None:
    dump = f"""Current thread 0x00007f (most recent call first):
  File "/usr/lib/python3/site-packages/torch/nn/functional.py", line 7 in relu
  File "{tmp_path}/model.py", line 12 in forward
  File "{tmp_path}/model.py", line 40 in loss
  File "/somewhere/planner/executor/run/worker.py", line 3 in run
"""
    path = write_model(tmp_path, "blocks", "sgd")
    job = Job(model=str(path), plan=make_plan(structural_profile(path, 4), (1, 1)))
    place = place_in_dump(dump, job)
    assert place is not None
    assert place.endswith("model.py:12 in forward()")
    assert place_in_dump("", job) is None


def test_the_place_is_in_the_thread_that_runs_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The main thread waits for one that reads data ahead; the current folder is that of the model.
    monkeypatch.chdir(tmp_path)
    dump = f"""Thread 0x00007e (most recent call first):
  File "{tmp_path}/model.py", line 12 in __getitem__
  File "/usr/lib/python3/threading.py", line 1 in _bootstrap

Current thread 0x00007f (most recent call first):
  File "/usr/lib/python3/threading.py", line 327 in wait
  File "/somewhere/planner/executor/run/worker.py", line 3 in run
  File "<frozen runpy>", line 88 in _run_code
"""
    path = write_model(tmp_path, "blocks", "sgd")
    job = Job(model=str(path), plan=make_plan(structural_profile(path, 4), (1, 1)))
    assert place_in_dump(dump, job) == "model.py:12 in __getitem__()"
