"""Trains with Lightning: the strategy differs. (A script lightning.py would hide the library.)

shardwright run -n 2 --set pipeline_parallel_degree=2 examples/lightning_loop.py
"""

from itertools import pairwise

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardwright.integrations.lightning import ShardwrightStrategy


class Autoencoder(L.LightningModule):
    """Squeezes rows of 28 numbers into 3."""

    def __init__(self):
        super().__init__()
        sizes = [28, 64, 64, 3, 64, 64, 28]
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(*layers[:-1], nn.Linear(64, 28))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.layers(x), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(x), x))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main():
    L.seed_everything(0)
    data = torch.randn(640, 3) @ torch.randn(3, 28)
    trainer = L.Trainer(
        strategy=ShardwrightStrategy(),  # <--
        accelerator="auto",
        devices=1,  # the ranks are those of the launcher
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
    )
    model = Autoencoder()
    validation = DataLoader(TensorDataset(data[512:]), batch_size=32)
    trainer.fit(model, DataLoader(TensorDataset(data[:512]), batch_size=32, shuffle=True), validation)
    trainer.save_checkpoint("model.ckpt")  # trainer.fit(..., ckpt_path="model.ckpt") goes on
    if trainer.is_global_zero:
        print(f"validation loss {trainer.callback_metrics['val_loss']:.4f}; saved model.ckpt")


if __name__ == "__main__":
    main()
