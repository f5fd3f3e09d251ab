"""The cost models' names, which plans record and the command line offers. No imports: help shows at once."""

from typing import Literal, get_args

CostModelName = Literal["resource", "pipedream", "paper"]
COST_MODEL_NAMES: tuple[str, ...] = get_args(CostModelName)
COST_MODEL_HELP = (
    "resource: what each processor and link does; pipedream: the optimizer PipeDream published; paper: the "
    "equation of its SOSP 2019 paper"
)
