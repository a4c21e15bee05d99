"""Trains with the loop of Accelerate: one import differs. (A script accelerate.py would hide the library.)

shardwright run -n 2 --set pipeline_parallel_degree=2 examples/accelerate_loop.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwright.integrations.accelerate import Accelerator  # in place of accelerate.Accelerator


class Tagger(nn.Module):
    """Returns its loss, as models of transformers do: its call in training is a whole step."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(64, 2)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    ids = torch.randint(32, (512, 12))
    data = [{"ids": row, "labels": (row > row[0]).long()} for row in ids]
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=16, shuffle=True), scheduler
    )
    for _epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.4f}")
    accelerator.save_state("state")  # accelerator.load_state("state") goes on, on any number of ranks
    accelerator.save_model(model, "model")
    accelerator.print("saved model")


if __name__ == "__main__":
    main()
