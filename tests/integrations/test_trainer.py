"""What a PipelineTrainer refuses, each with what to do instead; and its batches and folders."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import planner
from planner.errors import InputError

transformers: Any = pytest.importorskip(
    "transformers", reason="needs transformers: pip install transformers"
)
pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are not ours


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """Makes a PipelineTrainer of a small model with such arguments."""

    def make(plan: Any = None, kind: Any = None, **given: Any) -> Any:
        own = {"model", "callbacks", "compute_loss_func", "optimizers", "eval_dataset"}
        own |= {"compute_metrics", "data_collator", "train_dataset"}
        config = transformers.LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
        rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
        arguments = {name: value for name, value in given.items() if name not in own}
        args = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", **arguments
        )
        others = {name: value for name, value in given.items() if name in own}
        model = transformers.LlamaForCausalLM(config)
        return (kind or planner.PipelineTrainer)(
            **{"model": model, "args": args, "train_dataset": rows} | others, plan=plan
        )

    return make


@pytest.mark.parametrize(
    ("given", "sentence", "hint"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1", "model's forward"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0", "leave out"),
        ({"torch_compile": True}, "torch_compile", "compile=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True", "what fits"),
        (
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "eval_strategy": "epoch",
                "eval_dataset": [],
            },
            "follows a metric",
            "cosine",
        ),
        ({"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, "optimizers", "every stage"),
        ({"compute_loss_func": lambda *_, **__: 0}, "compute_loss_func", "model's forward"),
    ],
)
def test_arguments_that_a_pipeline_cannot_follow(
    given: dict[str, Any], sentence: str, hint: str, trainer: Any
) -> None:
    with pytest.raises(InputError) as error:
        trainer(**given)
    assert sentence in error.value.message
    assert hint in error.value.hint


def test_an_overridden_loss_is_refused(trainer: Any) -> None:
    class Own(planner.PipelineTrainer):  # type: ignore[misc, unused-ignore]
        def compute_loss(self, *given: Any, **others: Any) -> Any:
            return None

    with pytest.raises(InputError, match=r"Own overrides compute_loss\(\)"):
        trainer(kind=Own)


@pytest.mark.parametrize("name", ["_prepare_inputs", "_clip_grad_norm", "_save_checkpoint"])
def test_a_method_that_nothing_calls_is_refused(name: str, trainer: Any) -> None:
    kind = type("Own", (type("Mixin", (), {name: lambda *_: None}), planner.PipelineTrainer), {})
    with pytest.raises(InputError, match=rf"Own overrides {name}\(\)"):
        trainer(kind=kind)


def test_a_method_set_on_the_trainer_is_refused(trainer: Any) -> None:
    mine = trainer()
    mine.compute_loss = lambda *_, **__: None
    with pytest.raises(InputError, match=r"overrides compute_loss\(\)"):
        mine.train()


def test_methods_that_are_called_may_be_overridden(trainer: Any) -> None:
    class Own(planner.PipelineTrainer):  # type: ignore[misc, unused-ignore]
        def log(self, *given: Any, **others: Any) -> None:
            super().log(*given, **others)

        def of_its_own(self) -> None:
            pass

    assert trainer(kind=Own).model is not None


class Inside(transformers.TrainerCallback):  # type: ignore[misc]
    def on_pre_optimizer_step(self, *given: Any, **others: Any) -> None:
        pass


def test_a_callback_inside_a_step_is_refused(trainer: Any) -> None:
    with pytest.raises(InputError, match=r"Inside has on_pre_optimizer_step\(\)"):
        trainer(callbacks=[Inside()])


def test_a_callback_that_is_added_later_is_refused(trainer: Any) -> None:
    mine = trainer()
    mine.add_callback(Inside())
    with pytest.raises(InputError, match=r"Inside has on_pre_optimizer_step\(\)"):
        mine.train()


def freeze(model: Any) -> None:
    model.lm_head.weight.requires_grad_(False)


def scale(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(2)


def replace(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(8, 8))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (freeze, "requires_grad=False after on_step_begin"),
        (scale, "has changed after on_step_begin"),
        (replace, "has changed after on_step_begin"),
    ],
)
def test_callbacks_that_change_the_model_are_refused(
    change: Any, sentence: str, trainer: Any
) -> None:
    class Changes(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *given: Any, model: Any, **others: Any) -> None:
            change(model)

    mine = trainer(callbacks=[Changes()])
    handler = mine.callback_handler
    handler.watch(mine.model.to("meta"))
    handler.on_train_begin(mine.args, mine.state, mine.control)
    with pytest.raises(InputError, match=f"'lm_head.weight' .*{sentence}"):
        handler.on_step_begin(mine.args, mine.state, mine.control)


def test_callbacks_that_use_the_optimizer_are_refused(trainer: Any) -> None:
    class Rate(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *given: Any, optimizer: Any = None, **others: Any) -> None:
            if optimizer is not None:
                optimizer.param_groups[0]["lr"] = 1.0

    mine = trainer(callbacks=[Rate()])
    mine.callback_handler.hide_optimizer()
    with pytest.raises(InputError, match=r"uses optimizer\.param_groups"):
        mine.callback_handler.on_step_begin(mine.args, mine.state, mine.control)


def plan_of(**fields: Any) -> Any:
    usual = {"minibatch_size": 8, "microbatch_size": 4, "microbatches": 2, "autocast": None}
    return SimpleNamespace(**usual | fields)


@pytest.mark.parametrize(
    ("plan", "given", "sentence"),
    [
        ({}, {"per_device_train_batch_size": 4}, "8 samples per update"),
        ({"autocast": "bfloat16"}, {"per_device_train_batch_size": 8}, "autocast=bfloat16"),
    ],
)
def test_plans_for_other_batches(
    plan: dict[str, Any], given: dict[str, Any], sentence: str, trainer: Any
) -> None:
    with pytest.raises(InputError) as error:
        trainer(plan=plan_of(**plan), **given)
    assert sentence in error.value.message


def bert() -> Any:
    """A model whose forward takes any keyword argument, and ignores num_items_in_batch."""
    config = transformers.BertConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_labels=3,
        problem_type="single_label_classification",
    )
    return transformers.BertForSequenceClassification(config)


CLASSIFIED = [{"input_ids": [1, 2, 3], "labels": 1}, {"input_ids": [3, 2, 1], "labels": 2}]


def test_losses_that_ignore_the_number_of_labels_do_not_accumulate(trainer: Any) -> None:
    # Trainer adds them up, and the pipeline averaged them: half the loss, without a word
    given = {"model": bert(), "train_dataset": CLASSIFIED, "plan": plan_of()}
    with pytest.raises(InputError, match=r"loss of BertForSequenceClassification is .* not half"):
        trainer(per_device_train_batch_size=4, gradient_accumulation_steps=2, **given)

    assert trainer(per_device_train_batch_size=8, **given).model.training
    llama = trainer(plan=plan_of(), per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert llama.model_accepts_loss_kwargs


def test_losses_that_take_no_number_of_labels_do_not_accumulate(trainer: Any) -> None:
    model = bert()
    model.accepts_loss_kwargs = False
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(InputError, match="takes no num_items_in_batch") as error:
        trainer(plan=plan_of(), model=model, train_dataset=CLASSIFIED, **arguments)
    assert "per_device_train_batch_size=8" in str(error.value.hint)


def test_whether_a_subclass_scales_losses_is_not_followed(trainer: Any) -> None:
    class Own(planner.PipelineTrainer):  # type: ignore[misc, unused-ignore]
        loss_is_scaled_for_ga = False

    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(InputError, match="does not follow loss_is_scaled_for_ga=False of Own"):
        trainer(plan=plan_of(), kind=Own, **arguments)


def test_without_a_plan_it_only_measures(trainer: Any) -> None:
    with pytest.raises(InputError, match="has no plan"):
        trainer().train()
    with pytest.raises(InputError, match="does not predict"):
        trainer().predict([])


def test_evaluations_that_the_pipeline_cannot_do(trainer: Any) -> None:
    arguments = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    with pytest.raises(InputError, match="made without an eval_dataset"):
        trainer(plan=plan_of(), **arguments).evaluate([])
    with pytest.raises(InputError, match="more than a microbatch"):
        trainer(plan=plan_of(), eval_dataset=[], **arguments).evaluate()


def test_an_evaluation_is_refused_before_training(trainer: Any) -> None:
    # it was refused after the first epoch, whose work was lost
    sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    evaluating = trainer(plan=plan_of(), eval_dataset=[], eval_strategy="epoch", **sizes)
    with pytest.raises(InputError, match="more than a microbatch"):
        evaluating.train()
    assert not evaluating.is_in_train


def test_predictions_that_ranks_shard_are_refused(trainer: Any) -> None:
    last = SimpleNamespace(ranks=(1, 2), replicas=1, ranks_per_replica=2)
    plan = plan_of(stages=[SimpleNamespace(), last], config="1-1x2")
    evaluating = trainer(
        plan=plan,
        eval_dataset=[],
        compute_metrics=lambda predictions: {},
        per_device_train_batch_size=8,
        per_device_eval_batch_size=4,
    )
    with pytest.raises(InputError, match="shards them over 2 workers"):
        evaluating.evaluate()


def test_replicas_take_turns_by_batches() -> None:
    from planner.integrations.trainer_predictions import in_turns

    first, second, third = (torch.full((2,), float(number)) for number in range(3))
    assert in_turns([[first, third], [second]]) == [first, second, third]
    assert in_turns([[first], []]) == [first]
    assert in_turns([]) == []


def test_the_model_trains_as_in_a_step_of_trainer(trainer: Any) -> None:
    from planner.integrations.trainer_spec import training_spec

    measured = trainer()
    measured.model.eval()  # as from_pretrained() leaves it
    training_spec(measured, updates=1)
    assert measured.model.training


def test_batches_of_one_update_are_joined() -> None:
    from planner.integrations.trainer_spec import minibatches

    batches = [{"x": torch.full((2, 3), float(n)), "none": None} for n in range(3)]
    first, last = minibatches(batches, 2)
    assert first["x"][:, 0].tolist() == [0, 0, 1, 1]
    assert last["x"][:, 0].tolist() == [2, 2]
    longer = [{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}]
    with pytest.raises(InputError, match=r"differ in 'x': \(3,\) and \(4,\)"):
        list(minibatches(longer, 2))


@pytest.mark.parametrize("given", [{}, {"ignore_data_skip": True}], ids=["epoch", "ignoring"])
def test_collators_go_on_drawing_from_a_checkpoint(
    given: dict[str, Any], trainer: Any, tmp_path: Path
) -> None:
    # the first update's batches were collated before the generators were set
    from planner.integrations.trainer_checkpoints import read_generators, write_generators
    from planner.integrations.trainer_loop import TrainerLoop
    from planner.integrations.trainer_spec import length_of

    def collate(rows: list[Any]) -> dict[str, Any]:
        return {"x": torch.rand(len(rows))}

    class AtTheEpoch(transformers.TrainerCallback):  # type: ignore[misc]
        def on_epoch_end(self, *given: Any, **others: Any) -> None:
            if not (tmp_path / "generators.pt").exists():
                write_generators(tmp_path)

    def batches(done: int, drawn: Any = None) -> list[Any]:
        mine = trainer(
            data_collator=collate,
            callbacks=[AtTheEpoch()],
            per_device_train_batch_size=2,
            save_strategy="no",
            **given,
        )
        seen: list[Any] = []
        stage: Any = SimpleNamespace(
            minibatches=done,
            losses={},
            gradient_norm=None,
            step=lambda batch: seen.append(batch[1]["x"].tolist()),
            drain=lambda: None,
        )
        loader = mine.get_train_dataloader()
        length = length_of(mine, loader)
        mine.state = mine._state_for(length.updates, length.epochs, None)
        mine.state.global_step = done
        TrainerLoop(mine, stage, loader, length, drawn).run()
        return seen

    whole = batches(0)
    resumed = batches(2, read_generators(tmp_path))
    assert len(whole) == 6
    assert resumed == whole[2:]


def checkpoints(folder: Path, *steps: int) -> list[Path]:
    """Make checkpoints of these steps, a minute after one another."""
    folders = [folder / f"checkpoint-{step}" for step in steps]
    for minute, each in enumerate(folders):
        each.mkdir()
        os.utime(each, (60 * minute, 60 * minute))
    return folders


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_old_checkpoints_go(tmp_path: Path) -> None:
    from planner.integrations.trainer_checkpoints import remove_checkpoints

    folders = checkpoints(tmp_path, 5, 10, 20, 100)
    remove_checkpoints(tmp_path, None, None, folders[-1])
    assert all(folder.exists() for folder in folders)
    remove_checkpoints(tmp_path, 2, str(tmp_path / "checkpoint-5"), folders[-1])
    assert names(tmp_path) == {"checkpoint-100", "checkpoint-5"}


def test_a_run_resumed_from_an_earlier_step_keeps_what_it_writes(tmp_path: Path) -> None:
    # the checkpoint just written went, because an earlier run had come to a later step
    from planner.integrations.trainer_checkpoints import remove_checkpoints

    *_, written = checkpoints(tmp_path, 50, 100, 150, 60)
    remove_checkpoints(tmp_path, 2, None, written)
    assert names(tmp_path) == {"checkpoint-150", "checkpoint-60"}
    remove_checkpoints(tmp_path, 1, None, written)
    assert names(tmp_path) == {"checkpoint-60"}


def test_the_checkpoint_just_written_stays_where_times_say_nothing(tmp_path: Path) -> None:
    from planner.integrations.trainer_checkpoints import remove_checkpoints

    folders = checkpoints(tmp_path, 50, 100, 60)
    for folder in folders:
        os.utime(folder, (0, 0))
    remove_checkpoints(tmp_path, 2, None, folders[-1])
    assert names(tmp_path) == {"checkpoint-100", "checkpoint-60"}


def test_a_copy_of_a_checkpoint_is_not_counted(tmp_path: Path) -> None:
    from planner.integrations.trainer_checkpoints import remove_checkpoints

    (tmp_path / "checkpoint-5-backup").mkdir()
    *_, written = checkpoints(tmp_path, 5, 10)
    remove_checkpoints(tmp_path, 1, None, written)
    assert names(tmp_path) == {"checkpoint-5-backup", "checkpoint-10"}


def test_a_folder_of_trainer_is_no_checkpoint(tmp_path: Path) -> None:
    from planner.integrations.trainer_checkpoints import checkpoint_to_resume

    with pytest.raises(InputError, match="there is no checkpoint"):
        checkpoint_to_resume(True, str(tmp_path))
    (tmp_path / "trainer_state.json").touch()
    with pytest.raises(InputError, match="is no checkpoint of a PipelineTrainer"):
        checkpoint_to_resume(str(tmp_path), "")


@pytest.mark.parametrize("decay", [{"weight_decay": 0.1}, {}], ids=["decay", "default"])
def test_learning_rates_and_decay_are_those_of_trainer(decay: Any, trainer: Any) -> None:
    from planner.integrations.trainer_spec import stage_optimizer, stage_scheduler

    mine = trainer(**decay, learning_rate=0.5, lr_scheduler_type="cosine", warmup_steps=2)
    theirs = transformers.Trainer(model=mine.model, args=mine.args, train_dataset=[])
    theirs.create_optimizer_and_scheduler(10)
    own = stage_optimizer(mine, dict(mine.model.named_parameters()))
    rates = stage_scheduler(mine, own, 10)

    for group, expected in zip(own.param_groups, theirs.optimizer.param_groups, strict=True):
        assert group["weight_decay"] == expected["weight_decay"]
        assert list(map(id, group["params"])) == list(map(id, expected["params"]))
    for _ in range(10):
        assert rates.get_last_lr() == theirs.lr_scheduler.get_last_lr()
        own.step()
        rates.step()
        theirs.optimizer.step()
        theirs.lr_scheduler.step()
