"""Trains a classifier with Accelerate, as in its examples."""

import argparse
import json

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed


class Sentences(Dataset):
    """Sentences, and whether they end as they begin."""

    def __init__(self, num_samples, seed):
        self.ids = torch.randint(0, 37, (num_samples, 10), generator=torch.Generator().manual_seed(seed))
        self.labels = (self.ids[:, 0] % 2 == self.ids[:, -1] % 2).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def training_function(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(3)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=37, **sizes, **dropouts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_dataloader = DataLoader(Sentences(44, seed=1), shuffle=True, batch_size=8)
    eval_dataloader = DataLoader(Sentences(20, seed=2), batch_size=8)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=12)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    losses, rates, accuracies = [], [], []
    for _epoch in range(2):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            rates.append(lr_scheduler.get_last_lr()[0])
        model.eval()
        correct = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct.append(predictions == references)
        accuracies.append(torch.cat(correct).float().mean().item())
    accelerator.wait_for_everyone()
    weights = accelerator.get_state_dict(model)
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, state_dict=weights
    )
    if accelerator.is_main_process:
        with open(f"{args.output_dir}/report.json", "w") as file:
            json.dump({"losses": losses, "rates": rates, "accuracies": accuracies}, file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--accumulate", type=int, default=2)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
