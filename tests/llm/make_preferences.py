#!/usr/bin/env python3
"""Writes golden/training/dpo.json: the small llama of make_training.py learns preferences, by the
DPOTrainer of TRL (1.16 or newer, with transformers, PEFT and torch), in float32.

It has the tokens of the pairs as that trainer prepares them, "prompt", "chosen" and "rejected", and
the losses of five steps on all of them: "losses", all weights being trained; "lora", with the
adapters of llama.json in their place; "q8_0", the same on weights that were rounded to Q8_0.
test_training.c compares."""

import json
import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import torch
import transformers

import make_data  # stands in for the package datasets, which TRL imports
import make_training as training
import models
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

OUT = os.path.join(training.FOLDER, "dpo.json")
TEXTS = [("the cat sat on", " the mat.", " a dog, no."), ("2 and 2?", " 4", " it is 3."),
         ("who runs?", " the dogs do.", " no."), ("a", " b c d", " e")]


class Pairs(torch.utils.data.Dataset, make_data.Rows):
    """What the trainer reads rows from."""
    cache_files = ()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]

    def map(self, function, **how):
        return Pairs(super().map(function, **how).rows)


# isinstance(.., datasets.Dataset) is to hold
sys.modules["datasets"].Dataset = Pairs
sys.modules["trl.trainer.dpo_trainer"].Dataset = Pairs


class Recorder(DPOTrainer):
    """Keeps the losses, which the log rounds."""
    losses = ()

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses = (*self.losses, float("%.9g" % loss.item()))
        return loss


def tokenizer(folder):
    """A token for each letter."""
    tokens = [models.SPECIAL[0], *models.LETTERS, models.SPECIAL[1]]
    path = os.path.join(folder, "tokenizer.json")
    with open(path, "w", encoding="ascii") as file:
        json.dump(models.letters(tokens), file)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=path, eos_token=models.SPECIAL[1], pad_token=models.SPECIAL[1])


def learn(folder, adapter=None):
    """The losses, and the prepared pairs."""
    args = DPOConfig(
        output_dir=os.path.join(folder, "out"), per_device_train_batch_size=len(TEXTS),
        max_steps=training.STEPS, learning_rate=training.RATE, weight_decay=0.0, max_grad_norm=0.0,
        lr_scheduler_type="constant", optim="adamw_torch", bf16=False, use_cpu=True,
        gradient_checkpointing=False, logging_strategy="no", save_strategy="no", report_to="none",
        max_length=None, dataloader_pin_memory=False)
    rows = [dict(zip(("prompt", "chosen", "rejected"), texts)) for texts in TEXTS]
    config = None
    if adapter:
        config = LoraConfig(r=training.RANK, lora_alpha=training.ALPHA,
                            target_modules=adapter["config"]["target_modules"],
                            task_type="CAUSAL_LM")
    reference = None if adapter else training.load(folder)
    trainer = Recorder(model=training.load(folder), ref_model=reference, args=args,
                       train_dataset=Pairs(rows),
                       processing_class=tokenizer(folder), peft_config=config)
    for name, p in trainer.model.named_parameters():
        if p.requires_grad and adapter:
            p.data.copy_(torch.tensor(training.values(name.replace(".default.", "."), p.shape, "")))
    rows = trainer.train_dataset = trainer.train_dataset.rows  # prepared
    trainer.train()
    return list(trainer.losses), rows


def main():
    torch.set_num_threads(1)
    with open(os.path.join(training.FOLDER, "llama.json"), encoding="ascii") as file:
        model = json.load(file)
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        training.write(folder, model, False)
        golden["losses"], rows = learn(folder)
        golden["lora"], _ = learn(folder, model["adapter"])
        training.write(folder, model, True)
        golden["q8_0"], _ = learn(folder, model["adapter"])
    golden["pairs"] = [{key: row[key + "_ids"] for key in ("prompt", "chosen", "rejected")}
                       for row in rows]
    print(golden)
    with open(OUT, "w", encoding="ascii") as file:
        json.dump(golden, file)
        file.write("\n")


if __name__ == "__main__":
    main()
