"""Constraints on a plan beside memory: which layers share a stage."""

from planner.errors import InputError
from planner.formats.files import Record
from planner.formats.profile import Profile


class Constraints(Record):
    """Constraints that the chosen plan must meet."""

    together: tuple[tuple[str, ...], ...] = ()  # groups of layers that share a stage
    no_cut_after: tuple[str, ...] = ()  # layers that share a stage with the next one in the profile

    @property
    def empty(self) -> bool:
        return self == Constraints()

    def check(self, profile: Profile) -> None:
        known = {layer.name for layer in profile.layers}
        for name in (*(name for group in self.together for name in group), *self.no_cut_after):
            if name not in known:
                raise InputError(
                    f"the constraints name the layer '{name}', which the profile of '{profile.model}' does not have",
                    hint="plan show profile.json lists the layers",
                )

    def groups(self, profile: Profile) -> list[frozenset[int]]:
        """Return the groups of layers, by position, that no cut may separate; each layer is in exactly one."""
        position = {layer.name: index for index, layer in enumerate(profile.layers)}
        joined = [{position[name] for name in group} for group in self.together if group]
        ends = (position[name] for name in (*profile.no_cut_after, *self.no_cut_after))
        joined += [{end, end + 1} for end in ends if end + 1 < len(profile.layers)]
        merged: list[set[int]] = []
        for group in (*joined, *({index} for index in range(len(profile.layers)))):
            touching = [other for other in merged if other & group]
            merged = [other for other in merged if not other & group]
            merged.append(set(group).union(*touching))
        return sorted((frozenset(group) for group in merged), key=min)

    def as_forbidden_cuts(self, profile: Profile) -> Profile:
        """Return a profile whose `no_cut_after` says all this: stages are consecutive layers."""
        position = {layer.name: index for index, layer in enumerate(profile.layers)}
        forbidden = {*profile.no_cut_after, *self.no_cut_after}
        for group in self.together:
            places = sorted(position[name] for name in group)
            forbidden.update(layer.name for layer in profile.layers[places[0] : places[-1]])
        ordered = tuple(layer.name for layer in profile.layers if layer.name in forbidden)
        return profile.model_copy(update={"no_cut_after": ordered})
