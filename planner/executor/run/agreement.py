"""How workers begin and end together: one job, on hosts and devices that its plan was made for.

Every worker tells the others what it began with and what it sees, and all decide alike by that.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import mul

import torch
import torch.distributed as dist

from planner.errors import PlanError
from planner.executor.communication.control import join_group, message_timeout
from planner.formats.files import replace
from planner.formats.names import DeviceType
from planner.formats.plan import Plan
from planner.options.training import TrainingOptions
from planner.plan.shape import check_divided_loss, check_versions
from planner.runtime import check_kind, known_kinds
from planner.schedule.registry import file_of
from planner.simulator.simulate_plan import check_runs_to_end
from planner.version import __version__
from planner.workers.ending import abort_groups, keep_failures_ours
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.meeting import exchange, worker_store
from planner.workers.numerics import numerics_of
from planner.workers.place import (
    Place,
    Seat,
    assign_gpus,
    choose_place,
    names_of,
    own_seat,
    set_gpu_variables,
    take,
)
from planner.workers.supervisor import Supervisor

_log = logging.getLogger(__name__)


def start_worker(job: Job, heartbeat: Heartbeat | None = None) -> Heartbeat:
    """Set up this process, return its heartbeat; raise PlanError when the plan needs another number
    of workers.
    """
    world = int(os.environ["WORLD_SIZE"])
    needed = job.plan.workers
    if world != needed:
        raise PlanError(
            f"plan '{job.plan.config}' needs {needed} workers, but {world} were started",
            hint=f"start {needed}: --nnodes times --nproc-per-node of torchrun, or the tasks of "
            f"srun",
        )

    torch.set_num_threads(job.plan.device.threads or 1)
    keep_failures_ours()
    set_gpu_variables()
    heartbeat = heartbeat or Heartbeat()
    heartbeat.enter("starting")
    return heartbeat


@contextmanager
def joined(job: Job, heartbeat: Heartbeat, supervisor: Supervisor) -> Iterator[None]:
    """Join the other workers, unless that was done before, and leave them at the end.

    Models are built within: no worker waits with a time-out, and one that is gone is missed at
    once. At an error the supervisor leaves the reason before anything that may block; then what was
    joined here is aborted.
    """
    heartbeat.enter("joining the other workers", meeting=True)
    joins = not dist.is_initialized()
    if joins:
        join_group(message_timeout(job.run_options.hang_timeout_s))
    try:
        supervisor.enter()
        heartbeat.enter("building its model")
        yield
        supervisor.leave()
    except BaseException as error:
        if isinstance(error, Exception):
            supervisor.fail(error)
        if joins:
            abort_groups()
        raise

    if joins:
        dist.destroy_process_group()


def check_schedule(plan: Plan) -> None:
    """Raise PlanError when the plan's streams do not run to their end: those of a plan edited by
    hand may not.
    """
    depths = [stage.in_flight for stage in plan.stages]
    check_versions(plan.schedule, plan.microbatches, plan.replicas, depths)
    check_runs_to_end(plan)


def take_place(job: Job, heartbeat: Heartbeat) -> Place:
    """Meet the other workers, agree with them on where to compute, and take this worker's place,
    before anything else.

    Raise PlanError when hosts were given different jobs, or are not what the plan was made for;
    InputError when the devices or the backend that the job asks for are not there.
    """
    heartbeat.enter("meeting the other workers", meeting=True)
    store = worker_store(message_timeout(job.run_options.hang_timeout_s))
    seats = exchange(store, own_seat(same_for_all(job), device_kind(job)))
    check_same_job(seats)
    check_servers(job.plan, seats)
    device = device_kind(job)
    if device not in (None, "cpu") and not any(seat.gpus for seat in seats):
        raise PlanError(
            f"the plan was made for GPUs ({job.plan.device.name}), and PyTorch sees none here",
            hint=f"is PyTorch built for {device}, and is CUDA_VISIBLE_DEVICES, or its like, "
            f"right? To train on CPUs, "
            "profile the model with `device=cpu` and solve again",
        )

    place = choose_place(seats, int(os.environ["RANK"]), device, job.backend)
    if place.kind != "cpu":
        check_gpus(job.plan, seats)
    measured = job.plan.cluster.backend
    if measured not in (None, place.backend) and os.environ["RANK"] == "0":
        text = "the links were measured over %s, and messages go over %s: predictions may not hold"
        _log.warning(text, measured, place.backend)

    if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL" and os.environ["RANK"] == "0":
        _log.warning(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective first, which takes 0.2 to 0.3 "
            "ms per rank of its "
            "group: training is slower than predicted; hint: unset it, or say INFO"
        )

    take(place)
    planned = numerics_of(job.plan)
    replace(planned, deterministic=planned.deterministic or job.options.deterministic).set()
    return place


def device_kind(job: Job) -> DeviceType | None:
    """Return the kind of device that the plan was made for, if it says so; raise PlanError if the
    job has another.
    """
    if job.device is not None:
        check_kind(job.device)
    planned = job.plan.device.kind
    if planned not in known_kinds():  # an imported profile does not know its device
        return job.device
    if job.device not in (None, planned):
        raise PlanError(
            f"the plan was made for {planned} ({job.plan.device.name}), and its times mean "
            f"nothing for "
            f"`device={job.device}`",
            hint=f"profile the model with `device={job.device}` and solve again, or leave out "
            f"`device`",
        )

    return planned


def check_same_job(seats: Sequence[Seat]) -> None:
    """Check that all workers run the same job; raise PlanError when hosts were given different
    ones.
    """
    for what, expected in seats[0].same.items():
        others = [seat for seat in seats if seat.same.get(what) != expected]
        if others:
            raise PlanError(
                f"{names_of(others)} began with {others[0].same.get(what)}, and "
                f"{names_of(seats[:1])} with {expected}",
                hint="give all hosts the same plan, the same arguments, and the same versions of "
                "planner and torch",
            )


def check_servers(plan: Plan, seats: Sequence[Seat]) -> None:
    """Raise PlanError unless hosts have as many workers as the plan's servers, or as several of
    these together.
    """
    sizes = [level.size for level in plan.cluster.levels]
    if len(sizes) == 1:  # all links are alike
        return
    hosts = [seat.server for seat in seats]
    for size in accumulate(sizes, mul):
        groups = [seat.rank // size for seat in seats]
        if len(set(groups)) == len(set(hosts)) == len(set(zip(groups, hosts, strict=True))):
            return

    started = Counter(hosts)
    raise PlanError(
        f"the plan is for {'x'.join(map(str, sizes))} GPUs, with {sizes[0]} consecutive workers "
        f"on each server, and "
        f"the hosts of the first workers are {', '.join(map(str, hosts[:8]))}",
        hint=f"start {sizes[0]} workers on each host, with consecutive ranks, or solve for these "
        f"hosts: "
        f"`sizes={started[hosts[0]]}x{len(started)}`",
    )


def check_gpus(plan: Plan, seats: Sequence[Seat]) -> None:
    """Check that workers have GPUs of one kind, or of the plan's kinds; raise PlanError when they
    have not.
    """
    names = [seat.gpus[index].name for seat, index in zip(seats, assign_gpus(seats), strict=True)]
    for kind, ranks in zip(
        plan.cluster.kinds or (None,), plan.cluster.kind_ranks or (range(len(seats)),), strict=True
    ):
        own = [seat for seat in seats if seat.rank in ranks]
        if not own:
            continue  # the plan leaves these GPUs idle
        if kind is None or kind.device is None:
            expected = names[own[0].rank]
        else:
            expected = kind.device
        others = [seat for seat in own if names[seat.rank] != expected]
        if not others:
            continue
        reason = f"the plan takes all GPUs as equal, and {names_of(own[:1])} has {expected}"
        hint = (
            "name the kinds of GPUs with `kinds=NAME=N,NAME=N` and solve again, or choose "
            "equal ones with "
        )
        hint += "CUDA_VISIBLE_DEVICES"
        if kind is not None:
            reason = (
                f"the plan was made for {expected} there: workers {ranks.start} to "
                f"{ranks.stop - 1} are "
            )
            reason += kind.title
            hint = (
                "start the hosts in the order of the cluster's `kinds`, or solve again for "
                "the GPUs as they are"
            )
        raise PlanError(
            f"{names_of(others)} would compute on {names[others[0].rank]}, and {reason}", hint=hint
        )


def same_for_all(job: Job) -> dict[str, str]:
    """Return what must be the same for all workers of a run, in words, by what it is."""
    own: dict[str, bool | set[str]] = dict.fromkeys(
        ("model", "run", "folder", "show_progress", "plan", "schedule_files"), True
    )
    # These may differ between hosts.
    own |= {
        "run_options": {"interface"},
        "checkpoints": {"resume"},
        "elastic": {"copy_folder"},
        "drift": {"profile"},
        "started_again": True,
    }
    plan = hashlib.blake2b(job.plan.model_dump_json().encode(), digest_size=7).hexdigest()
    same = {
        "planner": f"planner {__version__}",
        "torch": f"torch {torch.__version__}",
        "plan": f"the plan '{job.plan.config}' of digest {plan}",
    }
    file = file_of(job.plan.schedule)
    if file is not None:
        digest = hashlib.blake2b(file.read_bytes(), digest_size=7).hexdigest()
        same["schedule"] = f"the schedule '{job.plan.schedule}' of a file of digest {digest}"

    for name, value in job.model_dump(mode="json", exclude=own).items():
        fields = value if isinstance(value, dict) else {name: value}
        same |= {field: f"`{field}={content}`" for field, content in fields.items()}

    return same


def check_loss(plan: Plan, options: TrainingOptions) -> None:
    """Check that the plan trains on the loss that the model file defines; raise InputError with
    what to do instead.
    """
    accepted = options.accept_divided_loss
    check_divided_loss(plan.model, plan.loss, plan.schedule, plan.microbatches, accepted=accepted)
    divided = (plan.schedule.divides and plan.microbatches > 1) or max(plan.replicas) > 1
    if plan.loss is None and divided and not accepted and os.environ.get("RANK", "0") == "0":
        _log.warning(
            f"warning: it is not known what the loss of '{plan.model}' is a mean over, so "
            f"microbatches are weighted by their samples; hint: `plan profile` finds out by "
            f"running the model, which estimates do not; if the loss ignores labels, define "
            f"loss_weight(target)"
        )
