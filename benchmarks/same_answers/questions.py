"""The questions whose answers a change of the code must not change: what users ask, as keywords of
the functions.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import planner
from benchmarks.kept import ROOT
from benchmarks.same_answers.streams import stream_digests

PROFILES = ROOT / "profiles"
SCHEDULES = ("1f1b", "2bw", "1f1b-flush", "zb-h1", "gpipe", "interleaved")
DIVIDED = ("2bw", "1f1b-flush", "zb-h1", "gpipe", "interleaved", "auto")
MODELS = tuple(path.parent.name for path in sorted(PROFILES.glob("*/cpu.json")))
# A chain, a graph, and repeated blocks, for questions that take longer.
FEW = ("vgg16", "inception_v3", "gpt2")
# Models whose first and last stages share a weight, on GPUs that have hardly room for its copies.
TIED = ("gpt2", "bert", "t5")
TIED_SIZES = {"flat8": (8,), "levels4x2": (4, 2), "levels4x4": (4, 4), "levels8x4": (8, 4)}
TIED_MEMORY = {"1GB": 10**9, "2GB": 2 * 10**9, "4GB": 4 * 10**9}
# What differs between two runs of the same code: times, where they were measured, and where files
# were written.
IGNORED = {"seconds", "provenance", "folder"}

Ask = Callable[[], Any]


@dataclass(frozen=True)
class Machines:
    """Devices and links.

    Attributes:
        sizes: of each level, the innermost first.
        memory: of a device, relative to what the model and its activations take with four copies of
            its weights.
        speeds: of kinds of devices, relative to the profiled one, with half of the devices each.
        memory_bytes: of a device, in place of `memory`.
    """

    sizes: tuple[int, ...]
    memory: float | None = None
    speeds: tuple[float, ...] = ()
    memory_bytes: int | None = None

    def cluster(self, profile: planner.Profile) -> planner.Cluster:
        """Return the cluster for a profile: 10 Gbit/s inside a server and 1 Gbit/s outside, or 2
        Gbit/s flat.
        """
        bandwidths = [2.5e8] if len(self.sizes) == 1 else [1.25e9, 1.25e8]
        levels = [
            {"size": size, "bandwidth_bytes_per_s": bandwidth, "latency_s": 1e-4}
            for size, bandwidth in zip(self.sizes, bandwidths, strict=True)
        ]
        devices = 1
        for size in self.sizes:
            devices *= size
        kinds = [{"count": devices // len(self.speeds), "speed": speed} for speed in self.speeds]
        cluster = {"levels": levels, "kinds": kinds, "memory_bytes": self._memory_bytes(profile)}
        return planner.Cluster.model_validate(cluster)

    def _memory_bytes(self, profile: planner.Profile) -> int | None:
        if self.memory is None:
            return self.memory_bytes
        held = sum(4 * layer.weight_bytes + layer.saved_bytes for layer in profile.layers)
        return int(self.memory * held)


FLAT4, FLAT8, SERVERS = Machines((4,)), Machines((8,)), Machines((4, 2))
TIGHT8, TIGHT_SERVERS = Machines((8,), memory=1 / 3), Machines((4, 2), memory=1 / 3)
MIXED = Machines((8,), speeds=(2.0, 1.0))


def answer(name: str) -> Any:
    """Return the answer to a question as JSON, or the type of the error that stands for one."""
    try:
        return without_times(questions()[name]())
    except planner.PlannerError as error:
        return {"error": type(error).__name__}


def questions() -> dict[str, Ask]:
    """Return what answers each question, by its name."""
    asked: dict[str, Ask] = {}
    for model in MODELS:
        asked |= _about_plans(model)
        asked[f"price/{model}"] = partial(_price, model)
        asked[f"compare/{model}"] = partial(_compare, model)
    for model in FEW:
        asked |= _about_more(model)
    for model in TIED:
        asked |= _about_tied_weights(model)
    asked |= _about_divided_layers()
    asked |= _about_fit()
    for schedule in SCHEDULES:
        asked[f"stream/{schedule}"] = partial(stream_digests, schedule)
    return asked


def _about_plans(model: str) -> dict[str, Ask]:
    asked: dict[str, Ask] = {}
    for (name, machines), schedule in itertools.product(
        {"flat8": FLAT8, "levels4x2": SERVERS}.items(), SCHEDULES
    ):
        asked[f"plan/{model}/{name}/{schedule}"] = partial(
            _solve, model, machines, schedule=schedule
        )
    for schedule in ("1f1b", "2bw", "1f1b-flush"):
        asked[f"plan/{model}/tight8/{schedule}"] = partial(_solve, model, TIGHT8, schedule=schedule)
    asked[f"plan/{model}/tight4x2/gpipe"] = partial(_solve, model, TIGHT_SERVERS, schedule="gpipe")
    asked[f"plan/{model}/flat4/never"] = partial(
        _solve, model, FLAT4, recompute="never", depth="published"
    )
    return asked


def _about_more(model: str) -> dict[str, Ask]:
    return {
        f"plan/{model}/flat8/auto": partial(_solve, model, FLAT8, schedule="auto"),
        f"plan/{model}/levels4x2/survive": partial(_solve, model, SERVERS, survive=1),
        f"plan/{model}/mixed8/1f1b": partial(_solve, model, MIXED, schedule="1f1b"),
        f"plan/{model}/mixed8/1f1b-flush": partial(_solve, model, MIXED, schedule="1f1b-flush"),
        f"plan/{model}/flat4/ilp": partial(_solve, model, FLAT4, solver="ilp", max_stages=2),
        f"plan/{model}/tight8/sharded": partial(
            _solve, model, TIGHT8, schedule="1f1b-flush", shard_optimizer="always"
        ),
    }


def _about_tied_weights(model: str) -> dict[str, Ask]:
    return {
        f"tied/{model}/{name}/{memory}/{schedule}": partial(
            _solve, model, Machines(sizes, memory_bytes=memory_bytes), schedule=schedule
        )
        for name, sizes in TIED_SIZES.items()
        for memory, memory_bytes in TIED_MEMORY.items()
        for schedule in ("1f1b", "1f1b-flush", "2bw")
    }


def _about_divided_layers() -> dict[str, Ask]:
    return {
        f"degrees/{schedule}/{devices}": partial(_solve_divided, devices, schedule)
        for schedule in ("1f1b", "1f1b-flush")
        for devices in (8, 32)
    }


def _about_fit() -> dict[str, Ask]:
    asked = {"gpt2": (8, "l4"), "unet": (16, "a100-80gb"), "resnet50": (8, "a100-80gb")}
    return {f"fit/{model}": partial(_fit, model, gpus, gpu) for model, (gpus, gpu) in asked.items()}


def _profile(model: str) -> planner.Profile:
    return planner.load_profile(PROFILES / model / "cpu.json")


def _solve(model: str, machines: Machines, **keywords: Any) -> Any:
    profile = _profile(model)
    return _plan_and_timeline(profile, machines.cluster(profile), keywords)


def _solve_divided(devices: int, schedule: str) -> Any:
    profile = planner.estimate(
        PROFILES / "gpt2" / "model.py", batch_size=4, device="h100", tensor=(1, 2, 4)
    )
    cluster = planner.cluster(
        profile, topology=f"8x{devices // 8}", bandwidth="nvlink4,100Gbps", memory="40GB"
    )
    return _plan_and_timeline(profile, cluster, {"schedule": schedule})


def _plan_and_timeline(
    profile: planner.Profile, cluster: planner.Cluster, keywords: Mapping[str, Any]
) -> Any:
    """Return a plan, and a digest of its simulated timeline."""
    divides = keywords.get("schedule", "1f1b") in DIVIDED
    plan = planner.solve(
        profile,
        cluster,
        microbatches=2 * cluster.gpus if divides else 1,
        time_limit_s=float("inf"),
        **keywords,
    )
    timeline = without_times(planner.simulate(plan, 12).model_dump(mode="json"))
    digest = hashlib.sha256(json.dumps(timeline, sort_keys=True).encode()).hexdigest()
    return {"plan": plan.model_dump(mode="json"), "timeline": digest}


def _price(model: str) -> Any:
    profile = _profile(model)
    cluster = FLAT4.cluster(profile)
    prices = {}
    for stages, replicas in ((2, (3, 1)), (2, (1, 1)), (4, (1, 1, 1, 1))):
        # Synchronous, because stages of some models share a weight.
        plan = planner.price(
            profile, cluster, stages, replicas=list(replicas), schedule="1f1b-flush", microbatches=4
        )
        prices[plan.config] = plan.model_dump(mode="json")
    return prices


def _compare(model: str) -> Any:
    profile = _profile(model)
    plan = planner.solve(profile, SERVERS.cluster(profile), time_limit_s=float("inf"))
    return planner.compare(profile, plan).model_dump(mode="json")


def _fit(model: str, gpus: int, gpu: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        answer = planner.fit(
            PROFILES / model / "model.py", gpus, gpu=gpu, place=folder, time_limit_s=float("inf")
        )
    return answer.model_dump(mode="json")


def without_times(value: Any) -> Any:
    """Return the same JSON without what differs between two runs of the same code."""
    if isinstance(value, Mapping):
        return {key: without_times(item) for key, item in value.items() if key not in IGNORED}
    return [without_times(item) for item in value] if isinstance(value, list) else value
