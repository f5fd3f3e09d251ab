"""Estimated profiles: operations counted by hand, bytes as measured, plausible times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import InputError, ModelFileError
from planner.formats.profile import MemoryFormat, Profile
from planner.model.spec import TrainingSpec, load_model_file
from planner.profiler.estimated.devices import (
    COMPUTE_CLASSES,
    DEVICES,
    DTYPES,
    MEMORY_CLASSES,
    OP_CLASSES,
    DeviceSpec,
    DType,
    device_spec,
    known_as,
    parse_dtype,
)
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.profiler.estimated.trace import StepTrace, trace_step
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.reporting.tables.profile import profile_report
from tests.executor.models import MODELS, write_model
from tests.profiler.measured.test_profiling import MODEL as TIED

CHAIN = """
import torch
from torch import nn

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.act = nn.ReLU()
        self.next = nn.Conv2d(8, 4, 1, bias=False)
        self.lstm = nn.LSTM(16, 5, batch_first=True)
        self.head = nn.Linear(5, 7)

    def forward(self, images):
        x = self.next(self.act(self.conv(images)))
        return self.head(self.lstm(x.flatten(2))[0])

def build_model():
    return Chain()

def example_batch(batch_size):
    return torch.randn(batch_size, 3, 8, 8), torch.randint(0, 7, (batch_size, 4))

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""
BLOCKS = """
class Flat(nn.Module):
    def __init__(self, lstm):
        super().__init__()
        self.lstm = lstm

    def forward(self, x):
        return self.lstm(x.flatten(2))[0]

def blocks(model):
    return [model.conv, model.act, model.next, Flat(model.lstm), model.head]
"""
BATCH = 6
PIXELS = BATCH * 4 * 4  # after the first convolution
STEPS = BATCH * 4  # of the LSTM


def written(folder: Path, source: str, name: str = "net.py") -> TrainingSpec:
    path = folder / name
    path.write_text(source)
    return load_model_file(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written(folder := tmp_path_factory.mktemp("estimate"), CHAIN)
    return folder


@pytest.fixture(scope="module")
def chain(folder: Path) -> StepTrace:
    return trace_step(load_model_file(folder / "net.py"), BATCH)


def counting(what: str) -> DeviceSpec:
    """Return a device on which a second is one floating-point operation, one byte or one launch."""
    never = 1e30
    return replace(
        DEVICES["cpu"],
        peak_flops_per_s=dict.fromkeys(DTYPES, 1.0 if what == "flops" else never),
        bandwidth_bytes_per_s=1.0 if what == "bytes" else never,
        achieved_arithmetic=dict.fromkeys(COMPUTE_CLASSES, 1.0),
        achieved_bandwidth=dict.fromkeys(OP_CLASSES, 1.0),
        launch_s=1.0 if what == "launches" else 0.0,
    )


def counts(trace: StepTrace, what: str) -> dict[str, tuple[float, float, float]]:
    names = [layer.name for layer in trace.graph.layers]
    return dict(zip(names, zip(*trace.layer_seconds(counting(what)), strict=True), strict=True))


def test_operations_are_counted(chain: StepTrace) -> None:
    flops = counts(chain, "flops")
    conv = 2 * PIXELS * 8 * 3 * 9
    assert flops["conv"][:2] == pytest.approx((conv, conv))  # the images need no gradient
    following = 2 * PIXELS * 4 * 8
    assert flops["next"][:2] == pytest.approx((following, 2 * following))
    step = 2 * STEPS * 4 * 5 * (16 + 5)
    assert flops["lstm"][:2] == pytest.approx((step, 2 * step))
    head = 2 * STEPS * 7 * 5
    assert flops["head"][:2] == pytest.approx((head, 2 * head))
    assert flops["act"][:2] == pytest.approx((0, 0), abs=1e-9)


def test_bytes_are_counted(chain: StepTrace) -> None:
    moved = counts(chain, "bytes")
    images, weights, outputs = BATCH * 3 * 64, 8 * 3 * 9 + 8, PIXELS * 8
    assert moved["conv"][0] == pytest.approx(4 * (images + weights + outputs))
    # backward: gradient, result, gradient
    assert moved["act"][:2] == pytest.approx((4 * 2 * outputs, 4 * 3 * outputs))
    # SGD reads a gradient and a weight, and writes the weight
    assert moved["next"][2] == pytest.approx(4 * 3 * 4 * 8)


def test_launches_are_counted(chain: StepTrace) -> None:
    launches = counts(chain, "launches")
    assert launches["act"][:2] == (1, 1)
    assert launches["conv"] == (1, 1, 2)  # weight and bias are updated
    # Two for each of the four steps, besides the products over all steps.
    assert launches["lstm"][0] >= 8


def test_bytes_held_and_sent_are_those_of_a_measured_profile(tmp_path: Path) -> None:
    training_spec = written(tmp_path, TIED)
    measured = profile_model(training_spec, BATCH, ProfilingOptions(seconds=0.01, repeats=1))
    estimated = estimate_profile(training_spec, BATCH, EstimateOptions(device="cpu"))
    assert without_times(estimated) == without_times(measured)
    assert estimated.graph_hash == measured.graph_hash


def without_times(profile: Profile, but: Sequence[str] = ()) -> Profile:
    """Drop what needs a real step: times, kernels' workspaces, what was tried; and the saved bytes
    of layers `but`.
    """
    parts = [
        f"{part}_{kind}s" for part in ("forward", "backward") for kind in ("", "spread_", "thread_")
    ]
    parts += ["accumulate_s", "accumulate_thread_s", "weight_share"]
    times = dict.fromkeys(("update_s", *parts), 0.0) | dict.fromkeys(
        ("workspace_bytes", "update_workspace_bytes"), 0
    )
    saved = {layer.name: 0 if layer.name in but else layer.saved_bytes for layer in profile.layers}
    layers = tuple(
        layer.model_copy(update={**times, "saved_bytes": saved[layer.name]})
        for layer in profile.layers
    )
    same = dict.fromkeys(
        ("provenance", "device", "whole_step", "loss", "capture_checked", "optimizer_separable"),
        None,
    )
    return profile.model_copy(update={"layers": layers, **same})


def test_attention_is_captured_as_on_a_real_device(tmp_path: Path) -> None:
    """On the meta device its result has another memory layout, so operations and the graph's hash
    would differ.
    """
    source = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.qkv(x).split(8, 2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(
            y.transpose(1, 2).contiguous().reshape(x.shape) + torch.ones(8, device=x.device)
        )

def build_model():
    return Net()

def example_batch(batch_size):
    return torch.randn(batch_size, 5, 8), torch.randint(0, 3, (batch_size, 5))

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""
    training_spec = written(tmp_path, source)
    measured = profile_model(training_spec, 2, ProfilingOptions(seconds=0.01, repeats=1))
    estimated = estimate_profile(training_spec, 2, EstimateOptions(device="cpu"))
    assert without_times(estimated) == without_times(measured)
    # A GPU's kernels keep other tensors, and the graph is the same.
    assert (
        estimate_profile(training_spec, 2, EstimateOptions(device="h100")).graph_hash
        == measured.graph_hash
    )


def test_what_an_lstm_keeps_is_near_to_what_is_measured(chain: StepTrace, tmp_path: Path) -> None:
    measured = profile_model(
        written(
            tmp_path, CHAIN.replace("LSTM(16, 5", "LSTM(16, 128").replace("(5, 7)", "(128, 7)")
        ),
        8,
    )
    estimated = estimate_profile(
        load_model_file(tmp_path / "net.py"), 8, EstimateOptions(device="cpu")
    )
    kept = [
        next(layer.saved_bytes for layer in p.layers if layer.name == "lstm")
        for p in (estimated, measured)
    ]
    assert kept[0] == pytest.approx(kept[1], rel=0.15)


def test_larger_batches_take_longer(folder: Path) -> None:
    traces = [trace_step(load_model_file(folder / "net.py"), size) for size in (2, 64, 2**20)]
    for name, spec in DEVICES.items():
        forward, backward, update = (
            [round(sum(part), 12) for part in times]  # where the host sets the pace, they are equal
            for times in zip(*(trace.layer_seconds(spec) for trace in traces), strict=True)
        )
        assert forward == sorted(forward), name
        assert backward == sorted(backward), name
        assert forward[0] < forward[-1], name
        assert update == pytest.approx([update[0]] * 3)


def test_it_says_that_it_is_estimated(folder: Path) -> None:
    profile = estimate_profile(
        load_model_file(folder / "net.py"), BATCH, EstimateOptions(device="V100")
    )
    assert profile.provenance.source == "estimated"
    assert profile.provenance.repeats is None
    assert profile.whole_step is None
    assert profile.device.kind == "cuda"
    assert profile.device.memory_bytes == 16138 * 2**20  # what a process can use of 16 GiB
    assert "V100" in profile.device.name
    assert profile.dtype == "float32"
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in profile.layers)
    assert profile.optimizer_elementwise


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_autocast_as_measured(dtype: DType, tmp_path: Path) -> None:
    """The graph has the same hash, so that a plan from the estimate trains under autocast."""
    training_spec = written(tmp_path, TIED)
    half = estimate_profile(training_spec, BATCH, EstimateOptions(device="h100", dtype=dtype))
    assert half.autocast == dtype
    assert half.dtype == "float32"  # of the weights
    measured = profile_model(
        training_spec, BATCH, ProfilingOptions(seconds=0.01, repeats=1, dtype=dtype)
    )
    # Without data, BatchNorm's statistics appear to be saved in half precision. CUDA's loss saves
    # its softmax in both.
    assert without_times(half, ("norm", "loss")) == without_times(measured, ("norm", "loss"))
    single = estimate_profile(training_spec, BATCH, EstimateOptions(device="h100"))
    by_name = {layer.name: layer for layer in half.layers}
    for layer in single.layers:
        other = by_name[layer.name]
        assert other.weight_bytes == layer.weight_bytes
        if layer.name in ("up", "down", "head"):  # not "frozen", whose sum is in single precision
            assert [value.output_bytes * 2 for value in other.outputs] == [
                v.output_bytes for v in layer.outputs
            ]
            # which decides what a codec saves
            assert {value.element_bytes for value in other.outputs} <= {2}
            assert {value.element_bytes for value in layer.outputs} <= {None}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("memory_format", [None, "channels-last"])
def test_all_kinds_of_models_as_measured(
    model: str, memory_format: MemoryFormat | None, tmp_path: Path
) -> None:
    """Models with blocks are among them; blocks that decide by values run with data."""
    training_spec = load_model_file(write_model(tmp_path, model, "momentum"))
    measured = profile_model(
        training_spec, 4, ProfilingOptions(seconds=0.01, repeats=1, memory_format=memory_format)
    )
    estimated = estimate_profile(
        training_spec, 4, EstimateOptions(device="cpu", memory_format=memory_format)
    )
    assert without_times(estimated) == without_times(measured)
    assert estimated.memory_format == memory_format
    assert all(layer.forward_s > 0 for layer in estimated.layers)


EXPERTS = """
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (token,) = torch.where(chosen == number)
            out = out.index_add(0, token, expert(x[token]))
        return out

def build_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), Experts(), nn.Linear(8, 2))

def example_batch(n):
    return torch.ones(n, 4), torch.zeros(n, dtype=torch.long)

loss = nn.functional.cross_entropy
"""


@pytest.mark.parametrize("blocks", ["", "\ndef blocks(model):\n    return list(model)\n"])
def test_models_that_decide_by_values_have_the_sizes_of_their_example(
    blocks: str, tmp_path: Path
) -> None:
    training_spec = written(tmp_path, EXPERTS + blocks)
    estimated = estimate_profile(training_spec, 6, EstimateOptions(device="v100"))
    assert estimated.provenance.sizes == "example"
    said = "the sizes depend on values, and are those of example_batch with untrained weights"
    assert said in profile_report(estimated)
    measured = profile_model(training_spec, 6, ProfilingOptions(seconds=0.01, repeats=1))
    flops = [
        [(layer.name, layer.forward_flops, layer.backward_flops) for layer in p.layers]
        for p in (estimated, measured)
    ]
    assert flops[0] == flops[1]
    # Equal samples go to one expert; argmax leaves the gate without a gradient.
    assert sum(layer.forward_flops or 0 for layer in estimated.layers) == 2 * 6 * (
        4 * 8 + 8 * 3 + 8 * 8 + 8 * 2
    )


def test_blocks_that_do_not_look_at_values_compute_nothing(tmp_path: Path) -> None:
    """Capture uses two samples; the whole batch would take 400 GB."""
    source = CHAIN + BLOCKS
    profile = estimate_profile(
        written(tmp_path, source), 500_000_000, EstimateOptions(device="h100")
    )
    assert [layer.name for layer in profile.layers] == [
        "conv",
        "act",
        "next",
        "blocks.3",
        "head",
        "loss",
    ]
    small = estimate_profile(
        written(tmp_path, CHAIN, "captured.py"), BATCH, EstimateOptions(device="cpu")
    )
    blocks = estimate_profile(
        load_model_file(tmp_path / "net.py"), BATCH, EstimateOptions(device="cpu")
    )
    times = [
        {layer.name: (layer.forward_s, layer.backward_s) for layer in p.layers}
        for p in (blocks, small)
    ]
    assert times[0]["conv"] == pytest.approx(times[1]["conv"])
    assert times[0]["blocks.3"] == pytest.approx(times[1]["lstm"], rel=0.15)  # one launch


def test_tensor_cores_are_used_when_asked_for(tmp_path: Path) -> None:
    source = TIED.replace("nn.Embedding(32, 8)", "nn.Embedding(32, 4096)").replace(
        "(8, 16)", "(4096, 4096)"
    )
    source = (
        source.replace("(16)", "(4096)")
        .replace("(16, 8)", "(4096, 4096)")
        .replace("(8, 8)", "(4096, 4096)")
    )
    training_spec = written(tmp_path, source.replace("(8, 32,", "(4096, 32,"))
    profiles = [
        estimate_profile(training_spec, 4096, EstimateOptions(device="a100", dtype=dtype))
        for dtype in ("float32", "tf32")
    ]
    single, tf32 = (
        next(layer.forward_s for layer in p.layers if layer.name == "down") for p in profiles
    )
    assert single / tf32 == pytest.approx(156 / 19.5, rel=0.1)


def test_models_that_look_at_numbers_are_built_in_memory(tmp_path: Path) -> None:
    source = TIED.replace(
        "    return Net()",
        "    net = Net()\n    assert float(net.up.weight.abs().sum()) > 0\n    return net",
    )
    profile = estimate_profile(written(tmp_path, source), BATCH, EstimateOptions(device="cpu"))
    assert profile.tied_parameters == (("embedding.weight", "head.weight"),)


def test_nothing_is_computed_or_kept(tmp_path: Path) -> None:
    """The weights would take 300 TB."""
    source = CHAIN.replace("Linear(5, 7)", "Linear(5, 15_000_000_000_000)")
    profile = estimate_profile(written(tmp_path, source), 2, EstimateOptions(device="h200"))
    assert (
        next(layer.weight_bytes for layer in profile.layers if layer.name == "head")
        == 4 * 6 * 15 * 10**12
    )


@pytest.mark.parametrize("name", list(DEVICES))
def test_the_table_makes_sense(name: str) -> None:
    spec = DEVICES[name]
    assert set(spec.achieved_arithmetic) == set(COMPUTE_CLASSES)
    assert set(spec.achieved_bandwidth) == set(OP_CLASSES)
    assert all(
        0 < share <= 3
        for share in (*spec.achieved_arithmetic.values(), *spec.achieved_bandwidth.values())
    )
    single = spec.peak("float32")
    assert 1e11 <= single <= spec.peak("tf32") <= spec.peak_flops_per_s.get("float16", 1e16)
    # Machine balance: these devices do between 5 and 120 single-precision operations per byte.
    assert 5 <= single / spec.bandwidth_bytes_per_s <= 120
    assert (spec.memory_bytes is None) == (spec.kind == "cpu")


def test_classes_are_named_once() -> None:
    assert len(set(OP_CLASSES)) == len(COMPUTE_CLASSES) + len(MEMORY_CLASSES)


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [
        ("v1000", "float32", "v100-pcie"),
        ("v100", "bfloat16", "float16"),
        ("titan-x", "float16", "tf32"),
    ],
)
def test_unknown_devices_and_types(device: str, dtype: DType, words: str) -> None:
    with pytest.raises(InputError) as error:
        device_spec(device, dtype)
    assert device in error.value.message
    assert words in error.value.hint


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("A100 80GB", "a100-80gb"),
        ("Tesla V100", "v100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("V1000", "v1000"),
    ],
)
def test_names_as_people_write_them(written: str, name: str) -> None:
    assert known_as(written) == name


def test_every_device_is_known_by_its_own_name() -> None:
    assert [known_as(name) for name in DEVICES] == list(DEVICES)


def test_names_of_types() -> None:
    assert [parse_dtype(text) for text in ("bf16", "fp16", "tf32", "float32")] == [
        "bfloat16",
        "float16",
        "tf32",
        "float32",
    ]
    with pytest.raises(InputError, match="'int8'"):
        parse_dtype("int8")


def test_optimizers_that_look_at_numbers_are_refused(tmp_path: Path) -> None:
    source = CHAIN + (
        "\nclass Careful(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        if float(self.param_groups[0]['params'][0].grad.norm()) < 1e9:\n"
        "            super().step(closure)\n"
        "\ndef optimizer(parameters):\n"
        "    return Careful(parameters, lr=0.1)\n"
    )
    with pytest.raises(InputError, match=r"optimizer in .*net\.py.* looks at numbers"):
        estimate_profile(written(tmp_path, source), BATCH, EstimateOptions(device="cpu"))


def test_a_step_that_fails_is_said_as_when_it_is_measured(tmp_path: Path) -> None:
    source = CHAIN.replace(
        "self.next(self.act(self.conv(images)))", "self.next(self.act(self.conv(images)).add_(1))"
    )
    words = "training step of the model fails: RuntimeError: one of the variables"
    with pytest.raises(ModelFileError, match=words):
        estimate_profile(written(tmp_path, source), 2, EstimateOptions(device="cpu"))
    with pytest.raises(ModelFileError, match=words):
        profile_model(written(tmp_path, source), 2, ProfilingOptions(repeats=1))


def test_mistakes_in_the_model_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`batch_size=0`"):
        estimate_profile(written(tmp_path, CHAIN), 0, EstimateOptions(device="cpu"))
    with pytest.raises(ModelFileError, match=r"net\.py:\d+: ZeroDivisionError"):
        estimate_profile(
            written(tmp_path, CHAIN.replace("return Chain()", "return 1 / 0")),
            2,
            EstimateOptions(device="cpu"),
        )
