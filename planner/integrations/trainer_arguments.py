"""What a PipelineTrainer does of what a Trainer is asked for, and what it refuses.

A Trainer has more than a hundred arguments, and each release brings new ones. So those that are
known here are listed, and any other one is refused where it has another value than its default:
nothing that was asked for is left out in silence.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from planner.errors import InputError
from planner.formats.plan import Plan

# Those that a PipelineTrainer follows, or that have no part in what is trained.
FOLLOWED = frozenset(
    [
        "output_dir",
        "do_train",
        "do_eval",
        "do_predict",
        "seed",
        "data_seed",
        "local_rank",
        "use_cpu",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "warmup_ratio",
        "optim",
        "optim_args",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "bf16",
        "logging_dir",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "logging_nan_inf_filter",
        "log_level",
        "log_level_replica",
        "log_on_each_node",
        "disable_tqdm",
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "eval_on_start",
        "per_device_eval_batch_size",
        "eval_accumulation_steps",
        "prediction_loss_only",
        "metric_for_best_model",
        "greater_is_better",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "save_only_model",
        "resume_from_checkpoint",
        "ignore_data_skip",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_in_order",
        "dataloader_multiprocessing_context",
        "remove_unused_columns",
        "label_names",
        "length_column_name",
        "train_sampling_strategy",
        "group_by_length",
        "average_tokens_across_devices",
        "use_cache",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        "ddp_timeout",
        "skip_memory_metrics",
    ]
)
# Records that a Trainer fills in itself.
_FILLED_IN = frozenset({"accelerator_config", "fsdp_config", "deepspeed_plugin"})

_PLANNED_CHECKPOINTING = (
    "the plan says which layers run forward again: `recompute` of planner.solve"
)
# What to do instead of an argument that is refused.
_INSTEAD: Mapping[str, str] = {
    "fp16": "give bf16=True, with a plan from a profile of bfloat16, or leave it out",
    "label_smoothing_factor": "let the model's forward compute the loss with smoothed labels",
    "gradient_checkpointing": _PLANNED_CHECKPOINTING,
    "activation_checkpointing": _PLANNED_CHECKPOINTING,
    "torch_compile": "leave it out: stages are compiled where the plan's profile was, with "
    "`compile=True` of planner.profile",
    "load_best_model_at_end": "leave it out, and load trainer.state.best_model_checkpoint after "
    "the training",
    "push_to_hub": "leave it out, and upload the folder that trainer.save_model() has written",
    "auto_find_batch_size": "leave it out: the plan says what fits",
    "fsdp": "leave it out: plan solve shards where that is better",
    "deepspeed": "leave it out: plan solve shards where that is better",
}
_SAMPLING = ("random", "sequential", "group_by_length")
_SCHEDULERS_BY_METRIC = ("reduce_lr_on_plateau", "greedy")

# Methods of a Trainer that a PipelineTrainer calls, or that only scripts call. Overriding any other
# one would do nothing.
_CALLED = frozenset(
    [
        "train",
        "evaluate",
        "predict",
        "end",
        "get_train_dataloader",
        "get_eval_dataloader",
        "get_test_dataloader",
        "_get_dataloader",
        "_get_train_sampler",
        "_get_eval_sampler",
        "_remove_unused_columns",
        "_set_signature_columns_if_needed",
        "_get_collator_with_removed_columns",
        "num_examples",
        "get_total_train_batch_size",
        "get_optimizer_cls_and_kwargs",
        "get_decay_parameter_names",
        "floating_point_ops",
        "log",
        "log_metrics",
        "metrics_format",
        "save_metrics",
        "save_state",
        "save_model",
        "_save",
        "create_model_card",
        "add_callback",
        "pop_callback",
        "remove_callback",
        "is_local_process_zero",
        "is_world_process_zero",
        "_move_model_to_device",
        "_validate_args",
        "_build_accelerator_args",
        "create_accelerator_and_postprocess",
    ]
)
_IN_THE_COLLATOR = "let the data_collator return the batch as the model is to see it"
# What to do instead of overriding a method that is not called.
_INSTEAD_OF_METHOD: Mapping[str, str] = {
    "_prepare_inputs": _IN_THE_COLLATOR,
    "_prepare_input": _IN_THE_COLLATOR,
    "create_optimizer": "give optimizer_cls_and_kwargs, of which every stage makes its own",
}
# Moments inside a step of the pipeline, in which all workers are at different microbatches.
_INSIDE_A_STEP = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")


def check_arguments(arguments: TrainingArguments) -> None:
    """Raise InputError for the first argument that a PipelineTrainer does not follow."""
    for each in fields(arguments):
        name = each.name
        value = getattr(arguments, each.name)
        if name in FOLLOWED or name in _FILLED_IN or _is_default(each, value):
            continue
        raise InputError(
            f"PipelineTrainer does not follow {name}={value!r} of TrainingArguments",
            hint=_INSTEAD.get(name, f"leave out {name}, or train with Trainer"),
        )

    strategy = str(getattr(arguments, "train_sampling_strategy", "random"))
    if strategy not in _SAMPLING:
        raise InputError(
            f"train_sampling_strategy={strategy!r} splits samples over processes, and all workers "
            f"of a pipeline read the same ones",
            hint=f"give one of {', '.join(_SAMPLING)}",
        )

    scheduler = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
    if scheduler in _SCHEDULERS_BY_METRIC:
        raise InputError(
            f"lr_scheduler_type={scheduler!r} follows a metric, which the workers of a pipeline do "
            f"not know when they step",
            hint="give a type that follows the number of steps, such as cosine",
        )


def _is_default(each: Field[Any], value: Any) -> bool:
    default = each.default
    if each.default_factory is not MISSING:
        default = each.default_factory()
    # A Trainer reads "" as an empty list, and None as an empty record.
    return value == default or (not value and not default)


def check_methods(trainer: Any, pipeline: type, base: type) -> None:
    """Raise InputError where `trainer` overrides what a PipelineTrainer does not call.

    Args:
        trainer: an instance, whose own attributes count as well.
        pipeline: the class PipelineTrainer, whose methods are replaced on purpose.
        base: the class Trainer.
    """
    own = [each for each in type(trainer).__mro__ if not issubclass(pipeline, each)]
    for name in (name for each in [*own, trainer] for name in vars(each)):
        if name.startswith("__") or name in _CALLED or not callable(getattr(base, name, None)):
            continue
        raise InputError(
            f"{type(trainer).__name__} overrides {name}(), which a PipelineTrainer does not call: "
            f"a step is that of the pipeline",
            hint=_INSTEAD_OF_METHOD.get(
                name,
                "put the loss into the model's forward, and the rest into a loop of your own: "
                "docs/guides/own-loop.md",
            ),
        )


def check_callback(callback: Any) -> None:
    """Raise InputError where a callback waits for a moment that a pipeline does not have."""
    kind = callback if isinstance(callback, type) else type(callback)
    for name in _INSIDE_A_STEP:
        if getattr(kind, name) is not getattr(TrainerCallback, name, None):
            raise InputError(
                f"{kind.__name__} has {name}(), and a step of a pipeline has no such moment: its "
                f"workers update at different times",
                hint="use on_step_begin() or on_step_end()",
            )


def check_constructor(given: Mapping[str, Any]) -> None:
    """Raise InputError for arguments of Trainer() that a PipelineTrainer cannot use."""
    instead = {
        "compute_loss_func": "let the model's forward compute the loss",
        "model_init": "build the model, after set_seed(), and give it as model",
        "optimizers": "give optimizer_cls_and_kwargs, of which every stage makes its own",
    }
    for name, hint in instead.items():
        value = given.get(name)
        if value is not None and value != (None, None):
            raise InputError(f"PipelineTrainer does not take {name}", hint=hint)


def check_plan(plan: Plan, arguments: TrainingArguments) -> None:
    """Raise InputError where the plan is for other batches or another precision."""
    size = arguments.per_device_train_batch_size
    batches = arguments.gradient_accumulation_steps
    if size * batches != plan.minibatch_size:
        raise InputError(
            f"the plan is for {plan.minibatch_size} samples per update, and "
            f"per_device_train_batch_size={size} with gradient_accumulation_steps={batches} are "
            f"{size * batches}",
            hint=f"give per_device_train_batch_size={plan.microbatch_size} and "
            f"gradient_accumulation_steps={plan.microbatches}, or "
            f"solve with `minibatch={size * batches}`",
        )

    planned = plan.autocast
    asked = "bfloat16" if arguments.bf16 else None
    if planned != asked:
        raise InputError(
            f"the plan was made for autocast={planned}, and TrainingArguments have "
            f"bf16={arguments.bf16}",
            hint="give bf16=True with a plan from a profile of bfloat16 under autocast, and "
            "bf16=False with any other one",
        )
