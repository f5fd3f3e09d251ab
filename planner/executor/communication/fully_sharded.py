"""Divide a stage's weights, gradients and optimizer over its replicas with PyTorch's `fully_shard`:
ZeRO-2 and ZeRO-3.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    SC20, stages 2, 3;
Zhao et al., "PyTorch FSDP", VLDB 2023. Each replica has some rows of every weight. A unit's weights
are gathered before it runs, and its gradients are summed at their owners in every backward, so that
nothing is left to reduce in the end. The optimizer steps the rows where they are.

Where groups of replicas repeat each other (HSDP, section 3.2.2 there), each group divides all
weights. The owners of the same rows all-reduce their sums in the last backward before an update,
and so have equal weights ever after.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.optim import Optimizer

from planner.errors import PlanError, first_line
from planner.executor.communication.reached_weights import ReachedWeights
from planner.executor.communication.sharding import Shard, Sharding
from planner.model.options import gradient_dtype
from planner.model.stage.stage import StageModule
from planner.model.stage.units import Unit
from planner.model.tensor.division import own_rows
from planner.model.tensor.row_exchange import exchange_over
from planner.model.tensor.sharded_unit import POSSIBLE, UNALIKE_POSSIBLE, divide
from planner.workers.groups import ShardGroups

_HINT = "solve with `shard_optimizer=never`"


@dataclass(eq=False)
class _Rows(Shard):
    """The rows of a parameter that this replica has, which the optimizer steps in their own
    memory.
    """

    def __post_init__(self) -> None:
        part: Tensor = self.parameter.to_local()  # type: ignore[attr-defined]
        self.stepped = nn.Parameter(part.detach().view(-1))


class FullSharding(Sharding):
    """One replica's part of a stage of level 2 or 3, which is divided when its optimizer has been
    made.

    Args:
        groups: of the replicas, which exchange weights and gradients on the `device`; the stage
            moves there.
        shards_weights: whether weights are divided, too, and not gradients alone.
        alike: whether every backward reaches the same weights, so that sums over several can wait
            in their groups.
    """

    def __init__(
        self,
        stage: StageModule,
        groups: ShardGroups,
        device: torch.device,
        *,
        shards_weights: bool,
        alike: bool = True,
    ) -> None:
        group = groups.dividing
        super().__init__((), (dist.get_rank(group), dist.get_world_size(group)), (), device)
        if not POSSIBLE:
            problem = (
                f"replicas that shard weights need a newer fully_shard than that of "
                f"PyTorch {torch.__version__}"
            )
            raise PlanError(problem, hint=f"install a newer PyTorch, or {_HINT}")
        if not alike and not UNALIKE_POSSIBLE:
            problem = (
                f"the model file names blocks(), of which replicas may use other weights, and "
                f"fully_shard of PyTorch {torch.__version__} sums gradients of the same ones alone"
            )
            raise PlanError(
                problem, hint=f"install a newer PyTorch, leave out blocks(), or {_HINT}"
            )

        self._stage = stage
        self._alike = alike
        self._reached: ReachedWeights | None = None
        self._shards_weights = shards_weights
        self._groups = groups
        self._exchange = exchange_over(group)
        self._mesh = _mesh_of(groups, device)
        self._sums_first = groups.repeating is not None and alike
        self.repeats = groups.repeating is not None and dist.get_rank(groups.repeating) > 0
        self._modules: list[FSDPModule] = []

    def divide(self, optimizer: Optimizer, whole: Collection[nn.Parameter] = ()) -> None:
        """See base class."""
        if whole:
            problem = (
                f"the plan shards weights by rows, and {type(optimizer).__name__} must "
                f"see some of them whole"
            )
            raise PlanError(problem, hint=_HINT)

        names = {parameter: name for name, parameter in self._stage.named_parameters()}
        # Half precision, of what has masters.
        self._stage.used_dtypes = {
            name: each.dtype for name, each in self._stage.named_parameters(remove_duplicate=False)
        }
        try:
            self._divide_stage()
        except (ValueError, NotImplementedError) as cause:
            problem = f"PyTorch's fully_shard does not shard these weights: {first_line(cause)}"
            raise PlanError(problem, hint=_HINT) from cause

        now = dict(self._stage.named_parameters())
        for parameter in now.values():
            rows = own_rows(parameter)
            width = parameter.numel() // max(1, parameter.shape[0])
            if parameter.requires_grad and rows.stop > rows.start:
                self.shards[parameter] = _Rows(
                    parameter, rows.start * width, rows.stop * width, whole=False
                )

        self.step_shards(optimizer, {parameter: now[name] for parameter, name in names.items()})

    def _divide_stage(self) -> None:
        units = self._stage.units
        assert units is not None
        if not self._alike:
            self._reached = ReachedWeights((*units.parts, units.whole))
        half = self._stage.options.half
        # BatchNorm's, for instance. What is gathered in half precision cannot be gathered together
        # with them.
        single = {
            each
            for each in self._stage.parameters()
            if half is not None and each.dtype == torch.float32
        }
        # gathered in half precision, where they have masters
        for parameter in self._stage.parameters():
            parameter.data = parameter.data.to(gradient_dtype(parameter)).contiguous()

        modules = dict(self._stage.named_modules(remove_duplicate=False))
        for unit, names in zip(units.parts, units.weights, strict=True):
            units.whole.add_module(str(len(units.whole._modules)), unit)
            for path in sorted({name.rpartition(".")[0] for name in names}):
                unit.hold(modules[path])
            own = {self._stage.get_parameter(name) for name in names} - single
            if own:
                self._apply(unit, own, half)

        for module in modules.values():
            units.whole.hold(module)

        # What no unit has is gathered once for the whole stage.
        divided = set[str]().union(*units.weights)
        held = self._stage.named_parameters(remove_duplicate=False)
        rest = {parameter for name, parameter in held if name not in divided or parameter in single}
        if rest & single and rest - single:
            raise ValueError(
                f"of those that run together some have masters of {half}, and some are in float32"
            )

        self._apply(units.whole, rest, None if rest & single else half)

    def _apply(self, unit: Unit, own: Collection[nn.Parameter], half: torch.dtype | None) -> None:
        if len(dtypes := {parameter.dtype for parameter in own if parameter.requires_grad}) > 1:
            raise ValueError(
                f"those that run together are {' and '.join(sorted(map(str, dtypes)))}"
            )

        others = set(self._stage.parameters()).difference(own)
        policy = MixedPrecisionPolicy(
            half, None if half is None else torch.float32, cast_forward_inputs=False
        )
        whole = divide(
            unit,
            self._mesh,
            self._exchange,
            shards_weights=self._shards_weights,
            alike=self._alike,
            mp_policy=policy,
            ignored_params=others,
        )
        self._modules.append(whole)

    def begin_backward(self, *, last: bool) -> None:
        """Prepare for a backward, after which level 2 keeps the weights unless it is the `last`
        before an update.

        Groups that repeat each other add up their gradients after that one alone.
        """
        if not self._shards_weights:
            self._modules[-1].set_reshard_after_backward(last)
        if self._sums_first:
            self._modules[-1].set_requires_all_reduce(last)

    def connect(self, group: dist.ProcessGroup) -> None:
        """Sum over those that divide the gradients: `group`, of all replicas, may have each part
        several times.
        """
        super().connect(self._groups.dividing)

    def part_with_weights(self) -> None:
        """Leave no weights gathered, as forwards without a backward do at level 2."""
        for module in self._modules:
            module.reshard()

    def take_gradients(self) -> None:
        """See base class."""
        if self._reached is not None:
            self._forget_unreached(self._reached)
        for parameter, shard in self.shards.items():
            if parameter.grad is not None:
                part: Tensor = parameter.grad.to_local()  # type: ignore[attr-defined]
                shard.stepped.grad = part.view(-1)
                parameter.grad = None

    def _forget_unreached(self, watch: ReachedWeights) -> None:
        """Leave no gradient where no replica had one: zeros were exchanged for it."""
        groups = [self._groups.dividing]
        if self._groups.repeating is not None:
            groups.append(self._groups.repeating)
        self.note("waiting for what its replicas have reached", True)
        reached = watch.take(groups, self._wire)
        self.note("updating its weights", False)

        for parameter in self._stage.parameters():
            if parameter not in reached:
                parameter.grad = None

    def update(self, step: Callable[[], object]) -> None:
        """Run `step` on the rows, from which the next forward gathers the weights."""
        step()


def _mesh_of(groups: ShardGroups, device: torch.device) -> DeviceMesh:
    """Return the mesh of the replicas: where groups repeat each other, with a row for each
    of them.
    """
    if groups.repeating is None:
        return DeviceMesh.from_group(groups.dividing, device.type)
    rows = torch.tensor([list(ranks) for ranks in groups.ranks])
    names = ("replicate", "shard")
    return DeviceMesh.from_group(
        [groups.repeating, groups.dividing], device.type, rows, mesh_dim_names=names
    )
