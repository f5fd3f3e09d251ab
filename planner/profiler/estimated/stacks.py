"""Stacks: what runs a model's operators in training, and which of them it fuses.

    eager      PyTorch's operations one by one
    compiled   torch.compile, with the fused kernels that people train transformers with
    megatron   Megatron-Core with Transformer Engine

Each says of every group of operators how it runs, and where the speed of that was measured. What is
fused is priced as one kernel (`execution.fused`); what it keeps for the backward is in `kept.py`.
An estimate without a stack is one of the eager stack, or of what `fusion` and `host` say.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.errors import InputError, did_you_mean
from planner.formats.files import replace
from planner.formats.names import STACKS, StackName
from planner.formats.profile import ChunkedLoss
from planner.profiler.estimated.devices import DEVICES, HOSTS, DeviceSpec
from planner.profiler.estimated.execution import Execution, Flow, compiler
from planner.units import format_seconds


@dataclass(frozen=True)
class Group:
    """How a stack runs a group of operators.

    Attributes:
        operators: which.
        how: in a few words.
        source: of the speed, or of the rule.
    """

    operators: str
    how: str
    source: str


@dataclass(frozen=True)
class Stack:
    """What a stack fuses.

    Attributes:
        name: for users.
        groups: of operators.
        host: kind of program that launches kernels (`devices.HOSTS`).
        compiles: whether chains of operations without products are one kernel each, which keeps
            what it reads.
        fuses_attention: whether attention that a model writes out, with sinks, windows or biases,
            is one kernel.
        attention: share of the peak that fused attention reaches, by GPU, where it is not that of
            the table.
        loss_chunks: parts of the tokens whose logits exist at a time; 1 for all at once.
        sequence_parallel: whether ranks that divide layers have a part of the tokens between them.
    """

    name: StackName
    groups: tuple[Group, ...]
    host: str = "eager"
    compiles: bool = False
    fuses_attention: bool = False
    attention: Mapping[str, float] | None = None
    loss_chunks: int = 1
    sequence_parallel: bool = False
    sends_once: bool = False

    @property
    def fuses_anything(self) -> bool:
        return self.compiles or self.fuses_attention

    def running(self, execution: Execution) -> Execution:
        """Return an execution with the kernels of this stack."""
        return replace(
            execution,
            stack=self.name,
            fusion=chains if self.compiles else None,
            fuses_attention=self.fuses_attention,
            keeps_inputs=self.compiles,
            loss_chunks=self.loss_chunks,
        )

    def untrained_words(self, chunked_loss: ChunkedLoss | None, *, compiled: bool) -> str:
        """Say what `plan train` runs otherwise than this stack.

        Args:
            chunked_loss: how it computes the loss; None for that of all tokens at once.
            compiled: whether it compiles stages.
        """
        does = []
        if not compiled:
            does.append("runs these stages eagerly")
        if self.fuses_attention:
            does.append("does not fuse attention that the model spells out")
        if self.loss_chunks > 1 and chunked_loss is None:
            does.append("computes the loss in one piece")
        if self.loss_chunks > 1 and chunked_loss is not None:
            again = format_seconds(chunked_loss.again_s)
            does.append(
                f"computes the logits of the loss's {chunked_loss.chunks} chunks twice ({again} "
                f"more per microbatch)"
            )

        *before, last = does
        listed = f"{', '.join(before)}, and {last}" if before else last
        return (
            f"these numbers are for kernels of the {self.name} stack. `plan train` {listed}, so it "
            f"may be slower and need more memory. For its numbers, estimate with `stack=eager`"
        )

    def on(self, spec: DeviceSpec) -> DeviceSpec:
        """Return the device with the kernels and the host of this stack."""
        if spec.kind != "cuda":
            return spec
        attention = (self.attention or {}).get(_key(spec))
        shares = spec.achieved_arithmetic
        if attention is not None:
            shares = {**shares, "attention": attention}
        return replace(spec, achieved_arithmetic=shares, dispatch_s=HOSTS[self.host])


def chains(flow: Flow) -> list[str | None]:
    """Fuse chains of operations without products, and the loss: what picks a token's logarithm is
    part of the kernel that makes it.
    """
    return [
        "chain" if operation.name in _PICKS else kernel
        for operation, kernel in zip(flow.operations, compiler(flow), strict=True)
    ]


def _key(spec: DeviceSpec) -> str:
    """Return the name of a device in the table; nothing for one of a file."""
    return next((name for name, own in DEVICES.items() if own.name == spec.name), "")


_PICKS = ("nll_loss_forward", "nll_loss_backward")

# cuDNN's, which PyTorch 2.9 and later take on Hopper, and FlashAttention-3's are alike: on the H200
# 0.64 to 0.66 forward and 0.52 to 0.60 backward (`own_h200.json`), 0.60 in all; vLLM 0.24 with
# FlashAttention-3 on H100, forward, causal, heads of 128, 8,192 and 16,384 tokens: 0.57 and 0.61
# (aiconfigurator 095f58a, Apache-2.0), which is 0.60 and 0.62 without what the diagonal takes. On
# B200 TensorRT-LLM's kernel reaches 0.53 and 0.59 there (vLLM 0.24), on GB200 0.52 and 0.58, on
# B300 0.66 and 0.75: 0.56 and 0.70 without the diagonal, times what H200's whole is of its forward.
_HOPPER = 0.6
_WHOLE_OF_FORWARD = 0.6 / 0.65
_FUSED_ATTENTION: Mapping[str, float] = {
    "h100": _HOPPER,
    "h200": _HOPPER,
    "gh200": _HOPPER,
    "b200": 0.56 * _WHOLE_OF_FORWARD,
    "gb200": 0.56 * _WHOLE_OF_FORWARD,
    "b300": 0.7 * _WHOLE_OF_FORWARD,
}
_KERNELS = "benchmarks/gpu_truth/README.md, constants"
_POINTWISE = f"the share of the bandwidth of pointwise kernels; {_KERNELS}"

EAGER = Stack(
    "eager",
    groups=(
        Group(
            "attention",
            "scaled_dot_product_attention is one kernel, spelt-out attention is several",
            _KERNELS,
        ),
        Group("norms, rotary embeddings, activations", "each operation a kernel", _KERNELS),
        Group("cross entropy", "logits whole, in single precision", "as traced"),
        Group("optimizer", "each operation once for all weights (foreach)", _KERNELS),
        Group("launches", "38 µs of the host each", _KERNELS),
    ),
)
COMPILED = Stack(
    "compiled",
    groups=(
        Group(
            "attention",
            "one kernel, with sinks, windows and biases (FlexAttention, FlashAttention-3, cuDNN)",
            "aiconfigurator 095f58a (Apache-2.0), forward; own_h200.json, both ways",
        ),
        Group(
            "norms, rotary embeddings, activations",
            "chains are fused into one kernel, which saves only its inputs",
            f"{_POINTWISE}; what is kept by PyTorch's partitioner (min-cut, Ansel et al. 2024, "
            "section 5)",
        ),
        Group(
            "cross entropy",
            "one kernel over an eighth of the tokens at a time",
            "torchtune's CEWithChunkedOutputLoss and torchtitan's chunked loss: 8 chunks",
        ),
        Group("optimizer", "each operation once for all weights (foreach)", _KERNELS),
        Group("launches", "6 µs of the host each", _KERNELS),
    ),
    host="compiled",
    compiles=True,
    fuses_attention=True,
    attention=_FUSED_ATTENTION,
    loss_chunks=8,
)
MEGATRON = Stack(
    "megatron",
    groups=(
        Group(
            "attention",
            "one kernel of cuDNN, with sinks and windows",
            "aiconfigurator 095f58a (Apache-2.0), forward; own_h200.json, both ways",
        ),
        Group(
            "norms, rotary embeddings, activations",
            "one kernel each, which keeps what it reads",
            _POINTWISE,
        ),
        Group("cross entropy", "one kernel, logits in half precision once", _POINTWISE),
        Group("optimizer", "each operation once for all weights", _KERNELS),
        Group(
            "sharded layers",
            "sequence parallelism: norms and dropouts by tokens",
            "Korthikanti et al. 2022, section 4.2",
        ),
        Group(
            "experts over servers",
            "a token is sent to a server once for all its experts there",
            "DeepEP (deepseek-ai/DeepEP, MIT), README",
        ),
        Group("launches", "6 µs of the host each", _KERNELS),
    ),
    host="fused",
    compiles=True,
    fuses_attention=True,
    attention=_FUSED_ATTENTION,
    sequence_parallel=True,
    sends_once=True,
)
_STACKS: Mapping[StackName, Stack] = {each.name: each for each in (EAGER, COMPILED, MEGATRON)}


def find_stack(name: str) -> Stack:
    """Return the stack of that name; raise InputError for any other word."""
    for known in STACKS:
        if known == name:
            return _STACKS[known]
    raise InputError(
        f"'{name}' is no stack that is known",
        hint=f"{did_you_mean(name, STACKS)}give one of {', '.join(STACKS)}",
    )
