"""GPUs of several kinds, as texts: how many there are of each, and the rates of their links."""

from collections.abc import Mapping

from planner.errors import ClusterError, InputError
from planner.formats.link_names import known_rate
from planner.options.cluster import Quantities, each, listed

Counts = Mapping[str, int]  # of the GPUs, by kind, in the order of their servers
EXAMPLE = "v100=12,t4=4"
RATES_EXAMPLE = "v100=nvlink2,10Gbps,t4=4GB/s,50Gbps"


def gpu_kinds(text: str) -> str | dict[str, int]:
    """Parse the name of a kind, or how many GPUs there are of each kind: "v100=12,t4=4"."""
    if "=" not in text:
        return text.lower()
    counts: dict[str, int] = {}
    for part in text.lower().split(","):
        name, _, number = map(str.strip, part.partition("="))
        if not name or not number.isdecimal():
            raise InputError(
                f"'{part}' in `gpu={text}` does not say how many GPUs of which kind there are",
                hint=f"write NAME=N,NAME=N, as in `gpu={EXAMPLE}`",
            )
        if name in counts:
            raise InputError(f"`gpu={text}` names {name} twice", hint="give each kind once")
        counts[name] = int(number)

    return checked_counts(counts)


def checked_counts(counts: Counts) -> dict[str, int]:
    """Return the numbers of GPUs by kind; raise InputError for a number below 1."""
    if not counts:
        raise InputError("`gpu` names no kind of GPU", hint=f"write `gpu={EXAMPLE}`")
    for name, number in counts.items():
        if number < 1:
            raise InputError(
                f"`gpu` has {number} GPUs of the kind {name}",
                hint="give 1 or more, or leave the kind out",
            )

    return {name.lower(): int(number) for name, number in counts.items()}


def link_rates(text: str) -> list[float | str] | dict[str, list[float | str]]:
    """Parse rates per level, "pcie4,10Gbps"; or those of each kind of GPU,
    "v100=nvlink2,10Gbps,t4=4GB/s,50Gbps".
    """
    if "=" not in text:
        return list(each(known_rate)(text))
    by_kind: dict[str, list[float | str]] = {}
    for part in text.split(","):
        name, equals, rate = part.rpartition("=")
        name = name.strip().lower()
        if equals:
            if not name or name in by_kind:
                raise ClusterError(
                    f"`bandwidth={text}` does not name each kind of GPU once",
                    hint=f"write `bandwidth={RATES_EXAMPLE}`",
                )
            by_kind[name] = []
        if not by_kind:
            raise ClusterError(
                f"'{part}' in `bandwidth={text}` comes before the name of a kind of GPU",
                hint=f"write `bandwidth={RATES_EXAMPLE}`",
            )
        by_kind[list(by_kind)[-1]].append(known_rate(rate))

    return by_kind


def rates_of(given: Quantities | Mapping[str, Quantities] | None, kind: str) -> list[float | str]:
    """Return the rates that were given for a kind of GPU, one per level; none where none were."""
    if isinstance(given, Mapping):
        return listed(given.get(kind))
    return listed(given)
