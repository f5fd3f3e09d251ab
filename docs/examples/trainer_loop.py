"""Fine-tune a language model with the Trainer of transformers, whose model is a pipeline.

The folder `base` beside this file is a model as save_pretrained() or the Hugging Face hub leave it,
with its tokenizer; `text.txt` is what to learn. Nothing is downloaded. Without a plan the script
measures the model; torchrun starts it once per worker of a plan:

    python trainer_loop.py
    plan solve --gpus 2 --bandwidth 1Gbps --schedule 1f1b-flush --minibatch 8
    torchrun --nproc-per-node 2 trainer_loop.py plan.json
    torchrun --nproc-per-node 2 trainer_loop.py plan.json checkpoints/checkpoint-10
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, set_seed

import planner

HERE = Path(__file__).parent
BASE, LENGTH = HERE / "base", 32


def model():
    set_seed(0)  # all workers begin with the same weights
    return AutoModelForCausalLM.from_pretrained(BASE)


def arguments(device="auto"):
    return TrainingArguments(
        "checkpoints",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,  # 8 samples per update, as the plan says
        per_device_eval_batch_size=4,
        dataloader_drop_last=True,  # a last one of two samples would have microbatches of one
        num_train_epochs=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=1,
        report_to="none",  # or wandb, tensorboard, ...: the first worker logs
        use_cpu=device == "cpu",
    )


def samples():
    text = (HERE / "text.txt").read_text(encoding="utf-8")
    tokens = AutoTokenizer.from_pretrained(BASE)(text)["input_ids"]
    starts = range(0, len(tokens) - LENGTH, LENGTH)
    rows = [tokens[start : start + LENGTH] for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def accuracy(predictions):
    guesses = predictions.predictions.argmax(-1)[:, :-1]
    return {"accuracy": float((guesses == predictions.label_ids[:, 1:]).mean())}


def what_to_train(device="auto"):
    data = samples()
    return {
        "model": model(),
        "args": arguments(device),
        "train_dataset": data[:-8],
        "eval_dataset": data[-8:],
        "compute_metrics": accuracy,
    }


def main(plan=None, checkpoint=None):
    trainer = planner.PipelineTrainer(**what_to_train(), plan=plan)
    if plan is None:
        trainer.profile().save("profile.json")
        return
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model("tuned")
    trainer.save_state()


if __name__ == "__main__":
    main(*sys.argv[1:])
