"""Trains with the Trainer of transformers: one import differs.

shardwright run -n 2 --set pipeline_parallel_degree=2 examples/trainer.py
"""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from shardwright.integrations.transformers import Trainer  # in place of transformers.Trainer


class Sequences(Dataset):
    """Arithmetic sequences: the next token follows from the two before it."""

    def __init__(self, num, seed):
        start, stride = torch.randint(64, (2, num, 1), generator=torch.Generator().manual_seed(seed))
        self.ids = (start + stride * torch.arange(32)) % 64

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, number):
        return {"input_ids": self.ids[number], "labels": self.ids[number]}


def main():
    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=4)
    arguments = TrainingArguments(
        "output",
        max_steps=60,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=20,
        save_steps=30,
        report_to="none",
    )
    trainer = Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=Sequences(2048, 1), eval_dataset=Sequences(64, 2)
    )
    trainer.train()  # resume_from_checkpoint=True goes on
    found = trainer.evaluate()
    trainer.save_model("output/model")  # for from_pretrained
    if trainer.is_world_process_zero():
        print(f"evaluation loss {found['eval_loss']:.4f}; saved output/model")


if __name__ == "__main__":
    main()
