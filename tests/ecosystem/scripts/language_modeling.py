"""Trains a language model with the Trainer of transformers, as in its examples."""

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Texts(Dataset):
    """Texts in which each token follows from the one before; the end of some does not count."""

    def __init__(self, num_texts, length, vocab_size, seed):
        first = torch.randint(0, vocab_size, (num_texts, 1), generator=torch.Generator().manual_seed(seed))
        self.ids = (first + 3 * torch.arange(length)) % vocab_size
        self.labels = self.ids.clone()
        for number in range(0, num_texts, 3):
            self.labels[number, length - 1 - number % length // 2 :] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def compute_metrics(prediction):
    logits, labels = prediction
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    set_seed(7)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=41, n_positions=16, n_embd=32, n_layer=4, n_head=2, **dropouts)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=args.output_dir,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=3e-3,
            eval_strategy="steps",
            eval_steps=3,
            save_steps=3,
            logging_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            greater_is_better=False,  # so that the model at the end is not the last one
            report_to="none",
        ),
        train_dataset=Texts(48, 12, config.vocab_size, seed=1),
        eval_dataset=Texts(16, 12, config.vocab_size, seed=2),
        compute_metrics=compute_metrics,
    )
    result = trainer.train(resume_from_checkpoint=args.resume or None)
    predictions = trainer.predict(Texts(17, 12, config.vocab_size, seed=3)).predictions
    trainer.save_model(str(Path(args.output_dir, "model")))
    if trainer.is_world_process_zero():
        report = {
            "history": trainer.state.log_history,
            "train_loss": result.training_loss,
            "predictions": predictions.sum(-1).tolist(),
        }
        Path(args.output_dir, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
