"""Fine-tunes a language model with the Trainer of transformers: the launcher says which ranks there are."""

import argparse
import json
import os

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Texts(Dataset):
    """Texts of a language with one rule: each token follows from the one before."""

    def __init__(self, num_texts, length, vocab_size, seed):
        first = np.random.RandomState(seed).randint(0, vocab_size, size=(num_texts, 1))
        self.ids = torch.from_numpy((first + 3 * np.arange(length)) % vocab_size)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def compute_metrics(prediction):
    logits, labels = prediction
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--fp16", type=int, default=0)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--resume", type=int, default=0)
    parser.add_argument("--model_dir", default=os.environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--output_data_dir", default=os.environ.get("SM_OUTPUT_DATA_DIR", "output"))
    args, _ = parser.parse_known_args()
    return args


if __name__ == "__main__":
    args = arguments()
    set_seed(7)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), args.dropout)
    config = GPT2Config(vocab_size=41, n_positions=16, n_embd=32, n_layer=4, n_head=2, **dropouts)
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output_data_dir,
            num_train_epochs=args.epochs,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.train_batch_size,
            per_device_eval_batch_size=args.train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            learning_rate=args.learning_rate,
            fp16=bool(args.fp16),
            evaluation_strategy="steps",
            save_strategy="steps",
            eval_steps=4,
            save_steps=4,
            logging_steps=2,
            save_total_limit=3,
            load_best_model_at_end=True,
            dataloader_drop_last=True,
            report_to=[],
        ),
        train_dataset=Texts(64, 12, config.vocab_size, seed=1),
        eval_dataset=Texts(16, 12, config.vocab_size, seed=2),
        compute_metrics=compute_metrics,
    )
    result = trainer.train(resume_from_checkpoint=bool(args.resume) or None)
    evaluation = trainer.evaluate()
    predictions = trainer.predict(Texts(16, 12, config.vocab_size, seed=3)).predictions
    os.makedirs(args.model_dir, exist_ok=True)
    trainer.save_model(args.model_dir)
    if trainer.is_world_process_zero():
        report = {
            "steps": trainer.state.global_step,
            "history": trainer.state.log_history,
            "loss": result.training_loss,
            "evaluation": evaluation,
            "predictions": list(predictions.shape),
        }
        with open(os.path.join(args.output_data_dir, "report.json"), "w") as file:
            json.dump(report, file)
        print("train_loss", result.training_loss, "eval_loss", evaluation["eval_loss"])
