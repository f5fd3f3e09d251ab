"""Find the weights that several stages share, and what prevents training them."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from planner.formats.plan import Plan
from planner.formats.profile import Layer, Profile


@dataclass(frozen=True)
class SharedWeight:
    """A parameter that layers of two stages use."""

    name: str
    layers: tuple[str, str]
    stages: tuple[int, int]

    def sentence(self, why: str) -> str:
        """Return a sentence that says who shares the weight, and ends in `why`."""
        return (
            f"stages {self.stages[0]} and {self.stages[1]} share the weight '{self.name}' of the "
            f"layers "
            f"'{self.layers[0]}' and '{self.layers[1]}'{why}"
        )


def shared_weights(
    stages: Sequence[Sequence[str]], parameters: Mapping[str, Collection[str]]
) -> Iterator[SharedWeight]:
    """Yield every weight that two stages use, once for each two of them, by the parameters of each
    layer.
    """
    # weight -> stages that use it -> the first layer that does
    users: dict[str, dict[int, str]] = {}
    for number, layers in enumerate(stages):
        for layer in layers:
            for name in sorted(parameters.get(layer, ())):
                users.setdefault(name, {}).setdefault(number, layer)
    for name, layer_of in users.items():
        for one, other in combinations(layer_of, 2):
            yield SharedWeight(name, (layer_of[one], layer_of[other]), (one, other))


def trained_parameters(profile: Profile) -> dict[str, set[str]]:
    """Return the trained parameters of each layer that others use, too; their bytes count in the
    first of them.
    """
    users = Counter(name for layer in profile.layers for name in set(layer.parameters))
    trained = {
        name
        for layer in profile.layers
        if layer.gradient_bytes
        for name in layer.parameters
        if users[name] > 1
    }
    return {
        layer.name: trained.intersection(layer.parameters) for layer in profile.layers if trained
    }


def copied_layers(profile: Profile, stages: Sequence[Sequence[str]]) -> list[list[Layer]]:
    """Return, for each stage, the layers of earlier stages whose trained weights it copies, each as
    a whole.
    """
    layer_of = {layer.name: layer for layer in profile.layers}
    copied: list[set[str]] = [set() for _ in stages]
    for weight in shared_weights(stages, trained_parameters(profile)):
        if layer_of[weight.layers[0]].gradient_bytes:
            copied[weight.stages[1]].add(weight.layers[0])
    return [[layer_of[name] for name in sorted(names)] for names in copied]


def obstacle(plan: Plan, shared: Collection[SharedWeight]) -> tuple[str, str] | None:
    """Return why training cannot keep the copies of shared weights equal, with a hint; None if it
    can.
    """
    for weight in shared:
        counts = [plan.stages[stage].replicas for stage in weight.stages]
        if plan.schedule.stashes and counts[0] != counts[1]:
            why = (
                f", but under 1f1b update it after {counts[0]} and {counts[1]} minibatches, so "
                f"that copies would differ"
            )
            return weight.sentence(why), "solve with `schedule=1f1b-flush`, which is synchronous"

    return None
