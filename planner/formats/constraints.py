"""Constraints on a plan beside memory: `constraints.json`, or the options of `plan solve`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from planner.errors import InputError
from planner.formats.cluster import Cluster
from planner.formats.files import AlwaysTrue, Record, load_record
from planner.formats.profile import Profile

Index = Annotated[int, Field(ge=0)]
_REMEDY = "see constraints.json in the file formats"


class Constraints(Record):
    """Constraints that the chosen plan must meet."""

    schema_version: Literal[1] = 1
    stage_of: dict[str, Index] = Field(default={})  # layer to the number of its stage
    gpu_of: dict[str, Index] = Field(default={})  # layer to the rank of a GPU that runs it
    together: tuple[tuple[str, ...], ...] = ()  # groups of layers that share a stage
    no_cut_after: tuple[str, ...] = ()  # layers that share a stage with the next one in the profile
    contiguous: AlwaysTrue = True  # always true; files of version 0.1 have it

    @property
    def empty(self) -> bool:
        return self == Constraints()

    def check(self, profile: Profile, cluster: Cluster) -> None:
        known = {layer.name for layer in profile.layers}
        groups = [name for group in self.together for name in group]
        for name in (*self.stage_of, *self.gpu_of, *groups, *self.no_cut_after):
            if name not in known:
                raise InputError(
                    f"the constraints name the layer '{name}', which the profile of '{profile.model}' does not have",
                    hint="plan show profile.json lists the layers",
                )
        for what, numbers in (("stage", self.stage_of), ("GPU", self.gpu_of)):
            for name, number in numbers.items():
                if number >= cluster.gpus:
                    raise InputError(
                        f"layer '{name}' is to be on {what} {number}, but {cluster.gpus} GPUs make "
                        f"{what}s 0 to {cluster.gpus - 1} at most",
                        hint=f"{what}s count from 0",
                    )

    def groups(self, profile: Profile) -> list[frozenset[int]]:
        """Return the groups of layers, by position, that no cut may separate; each layer is in exactly one."""
        position = {layer.name: index for index, layer in enumerate(profile.layers)}
        joined = [{position[name] for name in group} for group in self.together if group]
        ends = (position[name] for name in (*profile.no_cut_after, *self.no_cut_after))
        joined += [{end, end + 1} for end in ends if end + 1 < len(profile.layers)]
        for numbers in (self.gpu_of, self.stage_of):  # a GPU runs one stage
            joined += [{position[name] for name in numbers if numbers[name] == each} for each in set(numbers.values())]
        merged: list[set[int]] = []
        for group in (*joined, *({index} for index in range(len(profile.layers)))):
            touching = [other for other in merged if other & group]
            merged = [other for other in merged if not other & group]
            merged.append(set(group).union(*touching))
        return sorted((frozenset(group) for group in merged), key=min)

    def as_forbidden_cuts(self, profile: Profile, *, in_order: bool) -> Profile | None:
        """Return a profile whose `no_cut_after` says all this, if it can; `in_order`: stages are consecutive layers."""
        if self.stage_of or self.gpu_of:
            return None
        position = {layer.name: index for index, layer in enumerate(profile.layers)}
        forbidden = {*profile.no_cut_after, *self.no_cut_after}
        for group in self.together:
            places = sorted(position[name] for name in group)
            if not in_order and places != list(range(places[0], places[-1] + 1)):
                return None
            forbidden.update(layer.name for layer in profile.layers[places[0] : places[-1]])
        ordered = tuple(layer.name for layer in profile.layers if layer.name in forbidden)
        return profile.model_copy(update={"no_cut_after": ordered})


def load_constraints(path: Path | str) -> Constraints:
    """Read `constraints.json`; raise InputError naming the file, the field and the value that is wrong."""
    return load_record(Constraints, path, InputError, _REMEDY)
