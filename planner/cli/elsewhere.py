"""Flags of other programs that no flag here stands for: what to give in their place.

A flag that means the same as one here is an alias of it (`Option.aliases`). These do not, and
nothing converts them.
"""

from collections.abc import Mapping

_ACCUMULATION = (
    "it counts the microbatches of one replica, and stages here may have different numbers of "
    "replicas: give "
    "`microbatches`, those of all replicas together, or `minibatch`, to `plan solve`"
)
_STAGES = (
    "stages are found: `max_stages` of `plan solve` bounds them, and `stages` of `plan "
    "price` takes your own"
)
_REPLICAS = "the replicas of each stage are found; `replicas` of `plan price` takes your own"
_EACH_DEVICE = (
    "the samples of one forward are those of the profile: give `batch_size` to `plan profile`"
)

ELSEWHERE: Mapping[str, str] = {
    "--gradient-accumulation-steps": _ACCUMULATION,
    "--pipeline-parallel-size": _STAGES,
    "--pipeline-model-parallel-size": _STAGES,
    "--data-parallel-size": _REPLICAS,
    "--per-device-train-batch-size": _EACH_DEVICE,
}


def meaning_here(flag: str) -> str:
    """Return what stands for another program's flag here, as the beginning of a hint; "" for an
    unknown one.
    """
    sentence = ELSEWHERE.get(flag.replace("_", "-"))
    return f"{sentence}; " if sentence else ""
