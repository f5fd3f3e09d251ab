"""Heartbeats, and who is named when everything stands still: pages written by hand, no
processes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from planner.schedule.instructions import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    ReceiveShared,
    SendActivation,
    SendGradient,
    Unit,
    Update,
)
from planner.workers.failures import innermost, stage_of
from planner.workers.heartbeat import Beat, Heartbeat
from planner.workers.job import Failure, Job
from planner.workers.watch import HangDetector, Page
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile

TIMEOUT_S = 10.0
RECEIVE = ReceiveActivation(1, Unit(17), 0, 0)  # what stage 1 on rank 1 waits for, from rank 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file."""
    return write_model(tmp_path_factory.mktemp("model"), "blocks", "sgd")


@pytest.fixture(scope="module")
def detector_of(model: Path) -> Callable[..., HangDetector]:
    """Return a detector for a job with so many replicas of its stages."""
    profile = structural_profile(model, 4)

    def detector(*replicas: int) -> HangDetector:
        return HangDetector(Job(model=str(model), plan=make_plan(profile, replicas)), TIMEOUT_S)

    return detector


def beat_of(*instructions: Instruction) -> Beat:
    """What a worker does after it began the last of `instructions`."""
    heartbeat = Heartbeat()
    for instruction in instructions:
        heartbeat.begin(instruction)
    return heartbeat.read()


def test_a_worker_that_moved_is_named_with_its_stage_of_today(model: Path) -> None:
    job = Job(model=str(model), plan=make_plan(structural_profile(model, 4), (1, 1)))
    heartbeat = Heartbeat()
    heartbeat.enter("building its stages")
    assert stage_of(job, 1, heartbeat.read()) == 1
    heartbeat.hold(0)  # under another plan
    heartbeat.enter("waiting for the others", meeting=True)
    assert stage_of(job, 1, heartbeat.read()) == 0
    heartbeat.begin(RECEIVE)
    assert stage_of(job, 1, heartbeat.read()) == RECEIVE.stage


class Clock:
    """Writes all workers' pages anew at each look; `silent` ones write nothing after the first."""

    def __init__(self, detector: HangDetector, silent: Sequence[int] = ()) -> None:
        self._detector, self._silent, self._sequence = detector, silent, 0

    def look(
        self, beats: dict[int, Beat], now_s: float, cpu_s: float = 0.0, starved_s: float = 0.0
    ) -> Failure | None:
        self._sequence += 1
        return self._detector.look(
            {
                rank: Page(
                    beat=beat,
                    sequence=1 if rank in self._silent else self._sequence,
                    place=f"line {rank}",
                    cpu_s=0.0 if rank else cpu_s,
                    starved_s=0.0 if rank else starved_s,
                )
                for rank, beat in beats.items()
            },
            now_s,
        )


def judge(detector: HangDetector, beats: dict[int, Beat], *, silent: Sequence[int] = ()) -> Failure:
    """The verdict when `beats` have not changed for longer than the time-out."""
    clock = Clock(detector, silent)
    assert clock.look(beats, 0.0) is None
    assert clock.look(beats, TIMEOUT_S - 1) is None, "not yet"
    hang = clock.look(beats, TIMEOUT_S + 1)
    assert hang is not None
    return hang


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        (Forward(0, Unit(3)), "in the forward of minibatch 3"),
        (Backward(0, Unit(3, 2)), "in the backward of minibatch 3, microbatch 2"),
        (AllReduce(0, 5, 2), "in the all-reduce of round 5"),
        (RECEIVE, "waiting for the activations of minibatch 17 from worker 0"),
        (SendGradient(1, Unit(4), 0, 0), "sending the gradients of minibatch 4 to worker 0"),
        (
            ReceiveShared(1, Unit(4), 0, 0),
            "waiting for the shared weights' gradients of round 4 from worker 0",
        ),
    ],
)
def test_a_beat_says_what_its_worker_does(instruction: Instruction, words: str) -> None:
    assert Heartbeat().read().beats == 0
    beat = beat_of(instruction)
    assert beat.doing == words
    assert beat.stage == instruction.stage
    assert Beat.model_validate_json(beat.model_dump_json()) == beat


def test_an_update_is_told_by_the_workers_last_minibatch() -> None:
    assert beat_of(Backward(0, Unit(11)), Update(0, 5)).doing == "in the update after minibatch 11"


def test_a_phase_and_an_evaluation_are_told_apart_from_training() -> None:
    heartbeat = Heartbeat()
    heartbeat.begin(SendActivation(0, Unit(4), 1, 1))
    heartbeat.enter("writing a checkpoint")
    assert (heartbeat.read().doing, heartbeat.read().state) == (
        "while writing a checkpoint",
        "preparing",
    )
    heartbeat.begin(SendActivation(0, Unit(9), 1, 1), evaluating=True)
    assert (
        heartbeat.read().doing
        == "sending the activations of minibatch 9 of the evaluation to worker 1"
    )
    heartbeat.begin(Forward(0, Unit(2)), evaluating=True)
    assert heartbeat.read().doing == "in the forward of minibatch 2 of the evaluation"


def test_a_beat_has_the_slowest_instruction() -> None:
    heartbeat = Heartbeat()
    heartbeat.begin(SendActivation(0, Unit(4), 1, 1))
    time.sleep(0.02)
    heartbeat.begin(Forward(0, Unit(5)))
    assert heartbeat.read().slowest_s >= 0.02


Detectors = Callable[..., HangDetector]


def test_a_worker_that_computes_without_end_is_named_and_not_the_one_that_waits_for_it(
    detector_of: Detectors,
) -> None:
    hang = judge(detector_of(1, 1), {0: beat_of(Forward(0, Unit(17))), 1: beat_of(RECEIVE)})
    assert (hang.rank, hang.stage) == (0, 0)
    assert hang.message == "has not moved for 11 s, in the forward of minibatch 17, at line 0"


def test_the_one_that_waits_is_not_named_though_it_began_to_wait_earlier(
    detector_of: Detectors,
) -> None:
    clock, waiting = Clock(detector_of(1, 1)), beat_of(RECEIVE)
    clock.look({0: beat_of(Update(0, 3)), 1: waiting}, 0.0)
    both = {0: beat_of(Update(0, 3), Forward(0, Unit(17))), 1: waiting}
    assert clock.look(both, 4.0) is None
    assert clock.look(both, TIMEOUT_S + 1) is None, "rank 1 is late, but rank 0 may still send"
    hang = clock.look(both, TIMEOUT_S + 5)
    assert hang is not None
    assert hang.rank == 0


def test_a_stopped_worker_is_named_though_it_says_that_it_waits(detector_of: Detectors) -> None:
    sender = beat_of(SendActivation(0, Unit(18), 1, 1), ReceiveGradient(0, Unit(17), 1, 1))
    hang = judge(detector_of(1, 1), {0: sender, 1: beat_of(RECEIVE)}, silent=[1])
    assert hang.rank == 1
    assert (
        "waiting for the activations of minibatch 17 from worker 0: it does not respond: it is "
        in hang.message
    )


def test_a_worker_that_never_wrote_anything_is_named(detector_of: Detectors) -> None:
    hang = judge(detector_of(1, 1), {0: beat_of(ReceiveGradient(0, Unit(17), 1, 1))})
    assert (hang.rank, hang.stage) == (1, 1)
    assert hang.message.startswith("has not moved for 11 s, while starting: it does not respond")


def with_device(host: Instruction, device: Instruction | None, passed: int = 7) -> Beat:
    """What a worker does whose host is ahead of its device."""
    heartbeat = Heartbeat()
    heartbeat.begin(host)
    heartbeat.follow(lambda: (passed, device))
    return heartbeat.read(device=True)


def test_a_host_that_its_device_holds_up_is_not_named_while_the_device_waits_for_another_worker(
    detector_of: Detectors,
) -> None:
    """Its host has come to the next forward, and waits there: in the allocator, or for a queue that
    is full.
    """
    held_up = with_device(Forward(0, Unit(20)), ReceiveGradient(0, Unit(17), 1, 1))
    endless = with_device(Backward(1, Unit(17)), Backward(1, Unit(17)))
    hang = judge(detector_of(1, 1), {0: held_up, 1: endless})
    assert hang.rank == 1
    assert (
        "in the backward of minibatch 17, its device in the backward of minibatch 17"
        in hang.message
    )
    hang = judge(
        detector_of(1, 1), {0: held_up, 1: with_device(ReceiveActivation(1, Unit(20), 0, 0), None)}
    )
    assert hang.message.endswith(
        "and all others wait too: a link carries nothing, or lost a message"
    )


def test_a_device_that_computes_without_end_is_named_though_its_host_waits(
    detector_of: Detectors,
) -> None:
    endless = with_device(ReceiveGradient(0, Unit(18), 1, 1), Forward(0, Unit(17)))
    hang = judge(detector_of(1, 1), {1: beat_of(RECEIVE), 0: endless})
    assert hang.rank == 0
    assert "from worker 1, its device in the forward of minibatch 17" in hang.message


def test_a_device_that_goes_on_is_progress_of_a_host_that_waits_for_it(
    detector_of: Detectors,
) -> None:
    clock = Clock(detector_of(1))
    for second in range(40):
        beat = with_device(Forward(0, Unit(90)), Backward(0, Unit(second)), second)
        assert clock.look({0: beat}, float(second)) is None


def test_a_device_that_failed_is_not_asked_further() -> None:
    def failed() -> tuple[int, Instruction | None]:
        raise RuntimeError("CUDA error")

    heartbeat = Heartbeat()
    heartbeat.follow(failed)
    assert heartbeat.read(device=True).device is None


def test_a_message_that_does_not_arrive_is_the_links_fault(detector_of: Detectors) -> None:
    clock, sender = Clock(detector_of(1, 1)), beat_of(SendActivation(0, Unit(18), 1, 1))
    assert clock.look({0: sender, 1: beat_of(RECEIVE)}, 0.0) is None
    waiting = beat_of(SendActivation(0, Unit(18), 1, 1), ReceiveGradient(0, Unit(17), 1, 1))
    both = {0: waiting, 1: beat_of(RECEIVE)}
    assert clock.look(both, 2.0) is None
    assert clock.look(both, TIMEOUT_S + 1) is None, "rank 0 may still do its part"
    hang = clock.look(both, TIMEOUT_S + 3)
    assert hang is not None
    assert hang.rank == 1
    assert hang.message == (
        "has waited for 13 s for the activations of minibatch 17 from worker 0, and all others "
        "wait too: "
        "a link carries nothing, or lost a message"
    )


def test_nobody_is_named_while_the_one_waited_for_moves(detector_of: Detectors) -> None:
    clock = Clock(detector_of(1, 1))
    for second in range(40):
        moving = beat_of(Forward(0, Unit(17))).model_copy(update={"beats": second + 1})
        assert clock.look({0: moving, 1: beat_of(RECEIVE)}, float(second)) is None


def test_the_slowest_instruction_so_far_is_allowed_for(detector_of: Detectors) -> None:
    slow = beat_of(Forward(0, Unit(1))).model_copy(update={"slowest_s": 30.0})
    clock, beats = Clock(detector_of(1, 1)), {0: slow, 1: beat_of(RECEIVE)}
    assert clock.look(beats, 0.0) is None
    assert clock.look(beats, 39.0) is None
    assert clock.look(beats, 41.0) is not None


def test_a_replica_that_does_not_come_to_the_all_reduce_is_named(detector_of: Detectors) -> None:
    reducing = beat_of(AllReduce(0, 5, 2))
    hang = judge(detector_of(2), {0: reducing, 1: beat_of(Backward(0, Unit(11)))})
    assert (hang.rank, "at line 1" in hang.message) == (1, True)
    assert "a link carries nothing" in judge(detector_of(2), {0: reducing, 1: reducing}).message


def preparing(activity: str = "building its model", *, meeting: bool = False) -> Beat:
    heartbeat = Heartbeat()
    heartbeat.enter(activity, meeting=meeting)
    return heartbeat.read()


def test_a_worker_that_uses_its_processor_is_preparing_and_one_that_does_not_hangs(
    detector_of: Detectors,
) -> None:
    clock = Clock(detector_of(1, 1))
    beats = {0: preparing(), 1: preparing("joining the other workers", meeting=True)}
    for second in range(60):
        assert clock.look(beats, float(second), cpu_s=0.5 * second) is None
    hang = clock.look(beats, 75.0, cpu_s=29.6)
    assert hang is not None
    assert hang.rank == 0
    assert "while building its model" in hang.message


@pytest.mark.parametrize(
    ("ran", "starved", "hangs"),
    [
        (0.002, 0.998, False),  # others have its core: it uses all that it gets
        (0.03, 0.0, True),  # a core is free, and it does next to nothing
        (0.01, 0.4, True),  # it wakes up now and then, and waits for a core each time
        (0.0, 0.0, True),
    ],
)
def test_a_worker_that_waits_for_a_core_is_not_hung(
    ran: float, starved: float, hangs: bool, detector_of: Detectors
) -> None:
    clock = Clock(detector_of(1))
    times_s = [look / 2 for look in range(60)]
    found = [clock.look({0: preparing()}, at_s, ran * at_s, starved * at_s) for at_s in times_s]
    assert any(found) == hangs


def test_time_without_a_core_is_no_hang_in_any_instruction(detector_of: Detectors) -> None:
    clock, beat = Clock(detector_of(1)), beat_of(Forward(0, Unit(3)))
    found = [clock.look({0: beat}, float(at_s), starved_s=0.7 * at_s) for at_s in range(40)]
    assert next(at_s for at_s, hang in enumerate(found) if hang) == 34  # 10 of 34 s with a core


def test_when_all_wait_the_run_ends_all_the_same(detector_of: Detectors) -> None:
    beats = {0: beat_of(ReceiveGradient(0, Unit(17), 1, 1)), 1: beat_of(RECEIVE)}
    assert "all others wait too" in judge(detector_of(1, 1), beats).message


def test_the_place_is_the_users_innermost_line_in_the_thread_that_runs_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(model=str(model), plan=make_plan(structural_profile(model, 4), (1, 1)))
    monkeypatch.chdir(model.parent)
    loop = ("/somewhere/planner/executor/run/worker.py", 3, "run")
    main = [
        loop,
        (str(model), 40, "loss"),
        (str(model), 12, "forward"),
        ("/usr/lib/torch/functional.py", 7, "relu"),
    ]
    assert innermost([main], job) == f"{model.name}:12 in forward()"
    # The main thread waits for one that reads data ahead.
    waits = [
        ("<frozen runpy>", 88, "_run_code"),
        loop,
        ("/usr/lib/python3/threading.py", 327, "wait"),
    ]
    reads = [("/usr/lib/python3/threading.py", 1, "_bootstrap"), (str(model), 12, "__getitem__")]
    assert innermost([waits, reads], job) == f"{model.name}:12 in __getitem__()"


def test_a_worker_that_has_written_nothing_may_take_twice_as_long_to_start(model: Path) -> None:
    started_s = 3 * TIMEOUT_S
    job = Job(model=str(model), plan=make_plan(structural_profile(model, 4), (1, 1)))
    clock = Clock(HangDetector(job, TIMEOUT_S, started_s))
    here = Heartbeat()
    for now_s in (0.0, TIMEOUT_S + 1, started_s - 1):
        here.enter("meeting the other workers", meeting=True)
        assert clock.look({0: here.read()}, now_s) is None
    here.enter("joining the other workers", meeting=True)
    hang = clock.look({0: here.read()}, started_s + 1)
    assert hang is not None
    assert (hang.rank, hang.stage) == (1, 1)
    assert "while starting: it does not respond" in hang.message


def test_the_age_of_a_process_is_since_it_was_started() -> None:
    code = "import time; time.sleep(0.5); from planner.workers.watch import age_s; print(age_s())"
    began_s = time.monotonic()
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    # the system counts in hundredths
    assert 0.5 <= float(told) + 0.02 < time.monotonic() - began_s + 0.04


def elsewhere() -> Beat:
    heartbeat = Heartbeat()
    heartbeat.leave_to_script()
    return heartbeat.read()


def test_scripts_own_code_takes_as_long_as_it_likes_while_nobody_waits(
    detector_of: Detectors,
) -> None:
    clock, beats = Clock(detector_of(1, 1)), {0: elsewhere(), 1: elsewhere()}
    assert [clock.look(beats, float(second)) for second in range(0, 200, 5)] == [None] * 40


def test_a_script_that_does_not_come_back_is_named_once_another_one_has_waited_for_the_time_out(
    detector_of: Detectors,
) -> None:
    """Processor time that it uses is no progress: a loop without an end uses it, too."""
    clock = Clock(detector_of(1, 1))
    waits = preparing("waiting for the other ranks' step(), after 3 minibatches", meeting=True)
    found = []
    for second in range(60):
        beats = {
            0: elsewhere(),
            1: elsewhere() if second < 30 else waits.model_copy(update={"beats": 2}),
        }
        found.append(clock.look(beats, float(second), cpu_s=float(second)))
    first = next(second for second, hang in enumerate(found) if hang)
    assert first == 30 + TIMEOUT_S + 1
    hang = found[first]
    assert hang is not None
    assert (hang.rank, hang.message) == (
        0,
        "has not moved for 41 s, while running the script's own code, at line 0",
    )


def test_a_script_that_went_on_lately_is_not_named(detector_of: Detectors) -> None:
    clock = Clock(detector_of(1, 1))
    waits = preparing("waiting", meeting=True)
    for second in range(60):
        back = elsewhere().model_copy(update={"beats": second // 8})
        assert clock.look({0: back, 1: waits}, float(second)) is None


def test_a_scripts_process_that_is_stopped_does_not_respond(detector_of: Detectors) -> None:
    hang = judge(
        detector_of(1, 1), {0: preparing("waiting", meeting=True), 1: elsewhere()}, silent=[1]
    )
    assert (hang.rank, "it does not respond" in hang.message) == (1, True)


def test_a_hint_says_what_allows_for_more_time(model: Path) -> None:
    job = Job(model=str(model), plan=make_plan(structural_profile(model, 4), (1, 1)))
    detector = HangDetector(
        job, TIMEOUT_S, allows_more="planner.pipeline(..., hang_timeout_s=SECONDS)"
    )
    hang = judge(detector, {0: beat_of(Forward(0, Unit(17))), 1: beat_of(RECEIVE)})
    assert (
        hang.hint == "look there for what may block; allow more time with planner.pipeline(..., "
        "hang_timeout_s=SECONDS)"
    )
