"""A worker's own weights: equal however they are made, and the only ones that it keeps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.errors import InputError, PlannerError
from planner.executor.checkpoint import pretrained
from planner.executor.checkpoint.tensor_file import each_tensor, write_tensors
from planner.executor.run import stages
from planner.executor.run.build_context import pipeline_context
from planner.executor.run.context import PipelineContext
from planner.executor.run.stages import defers
from planner.formats.plan import Plan
from planner.model.options import PLAIN, ModuleOptions, gradient_dtype
from planner.model.spec import TrainingSpec, in_memory, load_model_file
from planner.options.training import TrainingOptions
from planner.workers.job import Job
from planner.workers.place import CPU
from tests.executor.models import EVALUATION, write_model
from tests.executor.plans import make_plan, structural_profile

BATCH_SIZE = 4


def _straight(path: Path) -> Path:
    """Let the blocks of a model file not decide by values, so that they can be captured without."""
    by_values, by_mode = "if row.mean() > 0 else", "if self.training else"
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(by_values, by_mode), encoding="utf-8")
    assert (by_values in source) == (path.name == "blocks_sgd.py")
    return path


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name = getattr(request, "param", "language")
    return _straight(write_model(tmp_path, name, "sgd", samples=20, more=EVALUATION))


PRETRAINED = """
from pathlib import Path

def pretrained():
    return Path(__file__).parent / "w.safetensors"
"""


def _plan(path: Path, stages: int = 2, options: ModuleOptions = PLAIN) -> Plan:
    return make_plan(structural_profile(path, BATCH_SIZE, options), (1,) * stages, "1f1b-flush", 2)


def _context(
    spec: TrainingSpec, plan: Plan, rank: int, defer: bool | None, evaluate: bool = False
) -> PipelineContext:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        options = TrainingOptions(evaluate_every=1 if evaluate else None)
        job = Job(
            model=spec.origin, plan=plan, steps=1, seed=3, options=options, defer_weights=defer
        )
        return pipeline_context(job, spec, CPU)


def _states(spec: TrainingSpec, plan: Plan, defer: bool | None) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for rank in range(len(plan.stages)):
        context = _context(spec, plan, rank, defer)
        assert context.deferred == bool(defer)
        for stage in context.stages.values():
            found |= stage.module.state_dict()
    found["generator"] = torch.get_rng_state()  # which dataset() may draw from
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["convolutional", "tied", "blocks"], indirect=True)
def test_equal_to_the_bit_however_they_are_made(model: Path) -> None:
    spec = load_model_file(model)
    for options in (PLAIN, ModuleOptions(half=torch.bfloat16)):
        plan = _plan(model, options=options)
        whole, deferred = (_states(spec, plan, defer) for defer in (False, True))
        assert whole.keys() == deferred.keys()
        for name, tensor in whole.items():
            assert torch.equal(tensor, deferred[name]), name
        assert (torch.bfloat16 in {tensor.dtype for tensor in whole.values()}) == (
            options.half is not None
        )


@pytest.mark.parametrize("defer", [False, True])
def test_pretrained_weights_have_masters(tmp_path: Path, defer: bool) -> None:
    """They are read into memory of their own, whose gradients are summed in float32 like any
    other's.
    """
    path = write_model(tmp_path, "language", "adamw", more=PRETRAINED)
    spec = load_model_file(path)
    write_tensors(tmp_path / "w.safetensors", spec.build_model().state_dict())
    (held,) = _context(
        spec, _plan(path, 2, ModuleOptions(half=torch.bfloat16)), 0, defer
    ).stages.values()
    assert held.optimizer.sharding is not None
    masters = [shard.stepped for shard in held.optimizer.sharding.shards.values()]
    assert {each.dtype for each in masters} == {torch.float32}
    assert {gradient_dtype(each) for each in held.module.parameters()} == {torch.float32}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", ["convolutional", "tied", "blocks"], indirect=True)
@pytest.mark.parametrize("defer", [False, True])
def test_no_other_weights_are_kept(
    model: Path, defer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the stage in training nor in evaluation leads to the model that it was cut from."""
    alive: list[weakref.ref[nn.Parameter]] = []
    spec, plan = load_model_file(model), _plan(model)
    build = spec.functions["build_model"]

    def watched() -> nn.Module:
        built: nn.Module = build()
        alive.extend(weakref.ref(parameter) for parameter in built.parameters())
        return built

    monkeypatch.setitem(spec.functions, "build_model", watched)
    context = _context(spec, plan, 1, defer, evaluate=True)
    gc.collect()
    own = {id(p) for stage in context.stages.values() for p in stage.module.parameters()}
    left = {id(p) for reference in alive if (p := reference()) is not None}
    assert left
    assert left == own


def test_models_in_memory_are_let_go(model: Path) -> None:
    file = load_model_file(model)
    built = file.build_model()
    alive = weakref.ref(built)
    spec = in_memory(built, example_batch=file.example_batch(2), loss=file.loss)
    plan = _plan(model)
    context = _context(spec, plan, 0, None)
    del built, spec
    gc.collect()
    assert alive() is None
    assert context.stages


def test_deferred_where_the_host_has_no_room(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, plan = load_model_file(model), _plan(model)
    job = Job(model=str(model), plan=plan, steps=1)
    bytes_ = sum(stage.memory.weights_bytes for stage in plan.stages)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for host, expected in ((6 * bytes_ + 10, False), (6 * bytes_ - 10, True)):
        monkeypatch.setattr(stages, "host_memory_bytes", lambda host=host: host)
        assert defers(job) == expected
        assert not defers(job.model_copy(update={"defer_weights": False}))
        assert defers(job.model_copy(update={"defer_weights": True}))
    assert _context(spec, plan, 0, None).deferred


def test_built_whole_where_it_cannot_be_deferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being asked for, deferred weights stop no model: these blocks decide by values."""
    path = write_model(tmp_path, "blocks", "sgd")
    spec, plan = load_model_file(path), _plan(path)
    monkeypatch.setattr(stages, "host_memory_bytes", lambda: 1)
    assert not _context(spec, plan, 0, None).deferred
    with pytest.raises(PlannerError, match="decide by values") as caught:
        _context(spec, plan, 0, True)
    assert "`defer_weights`" in caught.value.hint


KEPT = ("norm", "1")
PREFIX = f"""
def pretrained():
    return "prefixed.safetensors", lambda name: None if name.startswith({KEPT}) else "net." + name
"""
SHARDS = """
def pretrained():
    return "shards"
"""


def _write_shards(folder: Path, state: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    names = list(state)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, own in parts.items():
        write_tensors(folder / file, {name: state[name] for name in own})
    weight_map = {name: file for file, own in parts.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(
        str({"weight_map": weight_map}).replace("'", '"')
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["tied", "blocks"], indirect=True)
@pytest.mark.parametrize("defer", [False, True])
def test_pretrained_weights_equal_those_of_load_state_dict(
    model: Path, defer: bool, tmp_path: Path
) -> None:
    """From several files of bfloat16; and under a prefix, but for a part that keeps its first
    values.
    """
    spec, plan = load_model_file(model), _plan(model)
    torch.manual_seed(11)
    half = {
        name: t.bfloat16() if t.is_floating_point() else t
        for name, t in spec.build_model().state_dict().items()
    }
    half.pop("head.weight", None)  # tied weights have one name in some files
    _write_shards(tmp_path / "shards", half)
    write_tensors(
        tmp_path / "prefixed.safetensors", {"net." + name: tensor for name, tensor in half.items()}
    )
    source = model.read_text()
    for more in (SHARDS, PREFIX):
        model.write_text(source + more)
        torch.manual_seed(3)
        reference = spec.build_model()
        taken = {
            name: tensor
            for name, tensor in half.items()
            if more == SHARDS or not name.startswith(KEPT)
        }
        reference.load_state_dict(taken, strict=False)
        expected = reference.state_dict()
        found = _states(load_model_file(model), plan, defer)
        found.pop("generator")
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), (more, name)


@pytest.mark.parametrize("defer", [False, True])
def test_a_worker_reads_only_its_own_stages_tensors(
    model: Path, defer: bool, tmp_path: Path
) -> None:
    """From shards that have tensors of both stages."""
    plan, whole = _plan(model), load_model_file(model).build_model().state_dict()
    _write_shards(tmp_path / "shards", whole)
    model.write_text(model.read_text() + SHARDS)
    read: list[list[str]] = []

    def spy(file: Path, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in each_tensor(file, names):
            read[-1].append(name)
            yield name, tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "each_tensor", spy)
        for rank in range(2):
            read.append([])
            context = _context(load_model_file(model), plan, rank, defer)
            own = {name for stage in context.stages.values() for name in stage.module.state_dict()}
            assert set(read[-1]) == own
    assert sum(map(len, read)) == len(whole)


def test_pretrained_weights_of_a_model_on_the_meta_device(model: Path, tmp_path: Path) -> None:
    """Neither a file nor a script needs memory for the whole model."""
    file, plan = load_model_file(model), _plan(model)
    whole = file.build_model().state_dict()
    write_tensors(tmp_path / "whole.safetensors", whole)
    with torch.device("meta"):
        empty = file.build_model()
    batch, path = file.example_batch(2), tmp_path / "whole.safetensors"
    spec = in_memory(empty, example_batch=batch, loss=file.loss, pretrained=path)
    for name, tensor in _states(spec, plan, None).items():
        assert name == "generator" or torch.equal(tensor, whole[name]), name
    with torch.device("meta"):
        empty = file.build_model()
    with pytest.raises(PlannerError, match="is on the meta device, and has no values"):
        _context(in_memory(empty, example_batch=batch, loss=file.loss), plan, 0, None)


def _without(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name != "norm.bias"}


def _longer(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"model." + name: tensor for name, tensor in state.items()}


def _larger(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return state | {"head.bias": torch.zeros(7)}


def _more(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return state | {"extra": torch.zeros(7)}


@pytest.mark.parametrize(
    ("change", "words", "hint"),
    [
        (_without, "has no 'norm.bias', which the model has", "or None, from pretrained()"),
        (_longer, "has no 'embed.weight', which the model has", "its names are such as 'model."),
        (
            _larger,
            r"'head.bias' has the shape \(7,\) in .*whole.safetensors' and \(19,\) in the model",
            "new head",
        ),
        (_more, "has 'extra', which the model does not have", "leave the rest"),
    ],
)
def test_files_of_another_model(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    words: str,
    hint: str,
    model: Path,
    tmp_path: Path,
) -> None:
    plan = _plan(model)
    write_tensors(
        tmp_path / "whole.safetensors", change(load_model_file(model).build_model().state_dict())
    )
    model.write_text(model.read_text() + '\ndef pretrained():\n    return "whole.safetensors"\n')
    with pytest.raises(InputError, match=words) as caught:
        _context(load_model_file(model), plan, 1, False)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ('"missing.safetensors"', "no pretrained weights in safetensors files at .*missing"),
        ('"empty"', "no pretrained weights in safetensors files at .*empty"),
        ('"weights.bin"', r"no pretrained weights in safetensors files at .*weights\.bin"),
        ('"shards/model.safetensors.index.json"', "is no index"),
        ("7", "returned a int, not a path"),
    ],
)
def test_what_is_no_file_of_weights(returned: str, words: str, model: Path, tmp_path: Path) -> None:
    plan = _plan(model)
    (tmp_path / "empty").mkdir()
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "model.safetensors.index.json").write_text("[]")
    (tmp_path / "weights.bin").write_bytes(b"PK")
    model.write_text(model.read_text() + f"\ndef pretrained():\n    return {returned}\n")
    with pytest.raises(InputError, match=words):
        _context(load_model_file(model), plan, 0, None)


def test_a_host_without_control_groups_has_the_memory_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages, "_LIMITS", ())
    assert stages.host_memory_bytes() > 2**20
