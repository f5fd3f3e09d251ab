"""Fine-tune a language model of transformers with LoRA: a frozen base from local safetensors,
adapters of peft.

The folder `base` beside this file is a model as save_pretrained() or the Hugging Face hub leave it,
with its tokenizer; `text.txt` is what to learn. Nothing is downloaded. This file is both the model
file and the script:

    plan profile fine_tune.py --batch-size 4
    plan solve --gpus 2 --bandwidth 1Gbps --schedule 1f1b-flush --microbatches 4
    torchrun --nproc-per-node 2 fine_tune.py plan.json 3
"""

import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler

import planner

HERE = Path(__file__).parent
BASE, LENGTH, RATE = HERE / "base", 32, 2e-3
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def build_model():
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE, use_cache=False))
    return get_peft_model(base, LORA)


def pretrained():
    return BASE, name_in_base


def name_in_base(name):
    """Undo what peft does to names; None for adapters, which keep their first values."""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return None if ".lora_" in name else name


def example_batch(batch_size):
    return in_batch(torch.zeros(batch_size, LENGTH, dtype=torch.long))


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=RATE)


def in_batch(tokens):
    return (), {"input_ids": tokens, "labels": tokens}, None  # the model computes its loss


def samples():
    text = (HERE / "text.txt").read_text(encoding="utf-8")
    tokens = AutoTokenizer.from_pretrained(BASE)(text, return_tensors="pt")["input_ids"][0]
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


def main(plan_file, epochs):
    plan = planner.load_plan(plan_file)
    order = torch.Generator().manual_seed(0)  # every worker must see the same minibatches
    loader = DataLoader(
        samples(), plan.minibatch_size, shuffle=True, generator=order, collate_fn=torch.stack
    )
    with planner.pipeline(plan, __file__) as pipeline:
        total = epochs * len(loader)
        rates = [get_scheduler("cosine", each, total // 10, total) for each in pipeline.optimizers]
        for epoch in range(epochs):
            for tokens in loader:
                loss = pipeline.step(in_batch(tokens))
                for rate in rates:
                    rate.step()
            if os.environ["RANK"] == "0":
                print(f"epoch {epoch}: loss {loss:.4f}")
        pipeline.save_weights("tuned.pt")
    if os.environ["RANK"] == "0":
        model = build_model()
        model.load_state_dict(torch.load("tuned.pt"))
        model.save_pretrained("adapter")  # for PeftModel.from_pretrained


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
