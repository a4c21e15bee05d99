"""Uses what examples of the Trainer use: LoRA, recomputation, callbacks, early stop, resuming, best model."""

import argparse
import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Texts(Dataset):
    """Texts of several lengths in which each token follows from the one before."""

    def __init__(self, num_texts, seed):
        firsts = torch.randint(1, 41, (num_texts,), generator=torch.Generator().manual_seed(seed))
        self.ids = [1 + (first + 3 * torch.arange(8 + n % 5)) % 40 for n, first in enumerate(firsts)]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "attention_mask": torch.ones_like(self.ids[index])}


def collate(samples):
    length = max(len(sample["input_ids"]) for sample in samples)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for sample in samples:
        ids, missing = sample["input_ids"], length - len(sample["input_ids"])
        batch["input_ids"].append(torch.nn.functional.pad(ids, (0, missing)))
        batch["attention_mask"].append(torch.nn.functional.pad(sample["attention_mask"], (0, missing)))
        batch["labels"].append(torch.nn.functional.pad(ids, (0, missing), value=-100))
    return {name: torch.stack(rows) for name, rows in batch.items()}


class Counted(TrainerCallback):
    def __init__(self):
        self.called = []

    def on_step_end(self, args, state, control, **kwargs):
        self.called.append(state.global_step)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--resume")
    args = parser.parse_args()

    set_seed(7)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=41, n_positions=16, n_embd=32, n_layer=4, n_head=2, **dropouts)
    )
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    counted = Counted()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output_dir,
            num_train_epochs=2,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            learning_rate=1e-2,
            warmup_steps=1,
            weight_decay=0.01,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=True,  # so that the model at the end is not the last one
            logging_steps=1,
            report_to="tensorboard",
        ),
        train_dataset=Texts(28, 1),
        eval_dataset=Texts(10, 2),
        data_collator=collate,
        callbacks=[counted, EarlyStoppingCallback(early_stopping_patience=3)],
    )
    result = trainer.train(resume_from_checkpoint=args.resume)
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    trainer.save_model()
    metrics = trainer.evaluate(Texts(7, 3), metric_key_prefix="test")
    predicted = trainer.predict(Texts(4, 4)).predictions
    if trainer.is_world_process_zero():
        report = {
            "history": trainer.state.log_history,
            "called": counted.called,
            "test": metrics["test_loss"],
            "predicted": float(abs(predicted).sum()),
            "files": sorted(path.name for path in Path(args.output_dir).iterdir()),
        }
        Path(args.output_dir, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
